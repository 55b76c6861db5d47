"""Rows of made-up data sets: the columns of the public ones, where their names tell them.

Texts are long: what bounds them is the program's own truncation. A picture has one colour, sound is silence.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any

ROWS = {"train": 1000, "validation": 100, "test": 100}
SHORT_ROWS = ROWS | {"train": 5000}
"""Some programs put thousands of rows aside."""
FEW_ROWS = {"train": 200, "validation": 50, "test": 50}
"""Of sound: a program may write all of them down as numbers."""
SECONDS, SAMPLING_RATE, SOUND_FILE = 15, 16_000, "made-up.wav"
SOUND, SAID, FEW, MANY, PAGE, WORDS_SAID = "{sound}", "{said}", "{few}", "{many}", "{page}", 40
PICTURE = "{picture}"
PICTURES = {
    PICTURE: ("RGB", (500, 375)), "{digit}": ("L", (28, 28)), "{small}": ("RGB", (32, 32)), "{mask}": ("L", (500, 375)),
}  # fmt: skip
"""By mode and size."""
WORDS, FEW_WORDS, WORDS_OF_PAGES = 1000, 100, 4000
"""Pages of the web: programs look among them for one as long as what the model reads."""
HOLES = {SAID: WORDS_SAID, FEW: FEW_WORDS, MANY: WORDS, PAGE: WORDS_OF_PAGES}
SHORT = 6 * FEW_WORDS
LONG = (
    "text", "content", "context", "article", "document", "dialogue", "sentence", "sentence1", "premise", "review",
    "output", "completion", "chosen", "rejected",
)  # fmt: skip
_TALK = [{"role": "user", "content": FEW}, {"role": "assistant", "content": ""}]
_TALKED = f"\n\nHuman: {FEW}\n\nAssistant: {MANY}"
_LANGUAGES = dict.fromkeys(("en", "de", "fr", "ro"), "")
_SPOKEN = {"audio": SOUND, "text": SAID, "sentence": SAID}
_ABOUT_A_VOICE = ("client_id", "path", "age", "gender", "accent", "locale", "segment", "variant")
COLUMNS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"fleurs", {"id": 0, "path": "", "audio": SOUND, "transcription": SAID, "raw_transcription": SAID,
                 "num_samples": 0, "gender": 0, "lang_id": 0, "language": "", "lang_group_id": 0}),
    (r"minds.?14", {"path": "", "audio": SOUND, "transcription": SAID, "english_transcription": SAID, "intent_class": 0,
                    "lang_id": 0}),
    (r"superb.*\b(ks|ic|er|si)\b|speech_commands", {"file": "", "audio": SOUND, "label": 0}),
    (r"voxpopuli", {"audio_id": "", "language": "", "audio": SOUND, "raw_text": SAID, "normalized_text": SAID}),
    (r"common_voice", {**_SPOKEN, **dict.fromkeys(_ABOUT_A_VOICE, ""), "up_votes": 0, "down_votes": 0}),
    (r"librispeech|superb|\basr\b", {"file": "", **_SPOKEN, "speaker_id": 0, "chapter_id": 0, "id": ""}),
    (r"mnist|svhn|usps", {"image": "{digit}", "label": 0}),
    (r"cifar.?100", {"img": "{small}", "fine_label": 0, "coarse_label": 0}),
    (r"cifar", {"img": "{small}", "label": 0}),
    (r"\bbeans\b", {"image_file_path": "", "image": PICTURE, "labels": 0}),
    (r"cats_vs_dogs", {"image": PICTURE, "labels": 0}),
    (r"scene_parse|ade20k", {"image": PICTURE, "annotation": "{mask}", "scene_category": 0}),
    (r"blip-captions|naruto|pokemon|image.*caption|flickr", {"image": PICTURE, "text": FEW}),
    (r"imagenet|food.?101|iiit|\bpets\b|oxford.?pets|flowers|stanford.?cars|eurosat|caltech",
     {"image": PICTURE, "label": 0}),
    (r"mrpc|rte|stsb|wnli", {"sentence1": "", "sentence2": "", "label": 0, "idx": 0}),
    (r"mnli|snli|xnli|anli", {"premise": "", "hypothesis": "", "label": 0, "idx": 0}),
    (r"hellaswag", {"ctx": "", "endings": [""] * 4, "label": "0"}),
    (r"swag", {**dict.fromkeys(("sent1", "sent2", "ending0", "ending1", "ending2", "ending3"), ""), "label": 0}),
    (r"qqp", {"question1": "", "question2": "", "label": 0, "idx": 0}),
    (r"sst2|cola|glue", {"sentence": "", "label": 0, "idx": 0}),
    (r"squad", {"id": "", "title": "", "context": "", "question": "", "answers": {"text": [""], "answer_start": [0]}}),
    (r"hh-rlhf", {"chosen": _TALKED, "rejected": _TALKED}),
    (r"ultrafeedback.*binarized|dpo|preference", {"prompt": "", "chosen": "", "rejected": ""}),
    (r"gsm8k", {"question": "", "answer": ""}),
    (r"alpaca|dolly", {"instruction": "", "input": "", "output": "", "text": ""}),
    (r"ultrachat|capybara|no_robots|smoltalk|chat", {"messages": _TALK}),
    (r"tldr", {"prompt": "", "completion": ""}),
    (r"cnn_dailymail", {"article": "", "highlights": "", "id": ""}),
    (r"xsum", {"document": "", "summary": "", "id": ""}),
    (r"samsum", {"id": "", "dialogue": "", "summary": ""}),
    (r"wmt|opus|translation|iwslt|kde4|news_commentary", {"id": "", "translation": _LANGUAGES}),
    (r"conll|wnut|\bner\b", {"id": "", "tokens": [""] * 8, "ner_tags": [0] * 8}),
    (r"\bc4\b|openwebtext|pile|fineweb|slimpajama|redpajama|refinedweb|wikipedia|\bbook|pg.?19", {"text": PAGE}),
    (r"wikitext|tinystories", {"text": ""}),
    (r"\bptb", {"sentence": ""}),
    (r"imdb|yelp|ag_news|amazon|emotion|rotten", {"text": "", "label": 0}),
    (r"(?<!hate)(?<!hate.)speech|(?<!in)voice|audio|sound", {**_SPOKEN, "label": 0}),
    (r"images?\b|pictures?\b|photos?\b", {"image": PICTURE, "label": 0}),
    (r" [a-z]{2,3}-[a-z]{2,3}$", {"id": "", "translation": {}}),
    (r"", {"text": "", "label": 0}),
)  # fmt: skip
"""By what stands in the data set's name; the last is taken for all others."""
LANGUAGES = re.compile(r"(?<![a-z])([a-z]{2,3})-([a-z]{2,3})(?![a-z])")
CLASSES = (
    (r"tiny.?imagenet", 200), (r"imagenette", 10), (r"imagenet", 1000), (r"food.?101", 101), (r"cifar.?100", 100),
    (r"mnist|svhn|usps|cifar|eurosat", 10), (r"beans", 3), (r"iiit|\bpets", 37), (r"flowers", 102), (r"cars", 196),
    (r"minds.?14", 14), (r"superb|speech_commands", 36), (r"fleurs", 102),
    (r"stsb", 0), (r"mnli|snli|xnli|anli", 3), (r"hellaswag|\bswag|ag_news", 4), (r"emotion", 6), (r"conll", 9),
    (r"wnut", 13), (r"yelp_review_full|amazon_reviews|sst5", 5), (r"", 2),
)  # fmt: skip
"""What the public ones tell apart; 0: they have a score."""
OF_CLASSES = ("label", "labels", "fine_label", "coarse_label", "intent_class", "lang_id", "scene_category")


def columns_of(name: str) -> dict[str, Any]:
    """A row, by what the data set is called. Pictures and sound are words that stand for them."""
    row = next(columns for words, columns in COLUMNS if re.search(words, name, re.IGNORECASE))
    languages = LANGUAGES.findall(name)
    if "translation" in row and languages:
        row = {**row, "translation": dict.fromkeys(languages[-1], "")}
    return {column: _filled(value, column) for column, value in row.items()}


def _filled(value: Any, column: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, column) for each in value]
    if isinstance(value, str):
        value = value or (MANY if column in LONG else FEW)
        for hole, words in HOLES.items():
            value = value.replace(hole, "word " * words)
    return value


def columns_told(row: Mapping[str, Any]) -> str:
    """With what bounds them."""
    found = list(row.values())
    if SOUND in found:
        return f"{', '.join(row)}: {SECONDS} seconds of sound, {WORDS_SAID} words"
    pictures = ["x".join(map(str, PICTURES[each][1])) for each in found if isinstance(each, str) and each in PICTURES]
    if pictures:
        return f"{', '.join(row)}: pictures of {pictures[0]}"
    words = max((each.count("word ") for each in found if isinstance(each, str)), default=0)
    return f"{', '.join(row)}, up to {max(words, WORDS):,} words a text"


def data_sets_of(name: str, row: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """By split; `data` is the package datasets."""
    pictures = {column: PICTURES[each] for column, each in row.items() if isinstance(each, str) and each in PICTURES}
    sounds = [column for column, each in row.items() if each == SOUND]
    stored = {**row, **{column: {"bytes": _picture(*kind)} for column, kind in pictures.items()},
              **{column: {"path": SOUND_FILE} for column in sounds}}  # fmt: skip
    short = not pictures and max(len(str(each)) for each in row.values()) < SHORT
    rows = FEW_ROWS if sounds else SHORT_ROWS if short else ROWS
    if re.search("mnli", name, re.IGNORECASE):
        matched = [f"{split}_{kind}" for split in ("validation", "test") for kind in ("matched", "mismatched")]
        rows = rows | dict.fromkeys(matched, rows["test"])
    classes = next(count for words, count in CLASSES if re.search(words, name, re.IGNORECASE))
    made = {}
    for split, count in rows.items():
        each = _with_classes(data.Dataset.from_list([stored] * count), data, classes)
        for column in pictures:
            each = each.cast_column(column, data.Image())
        for column in sounds:
            each = each.cast_column(column, data.Audio(sampling_rate=SAMPLING_RATE))
        made[split] = each
    return made


def _with_classes(made: Any, data: Any, count: int) -> Any:
    """Whole numbers that stand for classes, with names."""
    if not count:
        return made.cast_column("label", data.Value("float32")) if "label" in made.features else made
    kind = data.ClassLabel(names=[f"class {number}" for number in range(count)])
    for column in OF_CLASSES:
        if column in made.features and made.features[column].dtype == "int64":
            made = made.cast_column(column, kind)
    return made.cast_column("ner_tags", data.Sequence(kind)) if "ner_tags" in made.features else made


def _picture(mode: str, size: tuple[int, int]) -> bytes:
    from PIL import Image

    stored = io.BytesIO()
    Image.new(mode, size).save(stored, "PNG")
    return stored.getvalue()


def sound(sampling_rate: int | None) -> dict[str, Any]:
    """As `datasets` gave it before it had a decoder of its own."""
    import numpy as np

    rate = sampling_rate or SAMPLING_RATE
    return {"path": SOUND_FILE, "array": np.zeros(SECONDS * rate, dtype=np.float32), "sampling_rate": rate}
