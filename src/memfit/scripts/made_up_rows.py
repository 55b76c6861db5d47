"""Rows of made-up data sets: the columns of the public ones, where their names tell them.

Texts are as long as the longest of the public set where it is known, else long: what bounds them is the program's own
truncation. Every sixth is short, so that batches are padded
and have a mask, as those of real texts. A picture has one colour, sound is silence.
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
SAMPLING_RATE = 16_000
SHORT_EVERY, SHORT_PART = 6, 20
"""Every sixth row has a twentieth of the words. Seldom enough that three batches of one row are hardly all short."""
SOUND, A_WORD, SAID, WORDS_SAID = "{sound}", "{word}", "{said}", 40
FEW, HALF, MANY, PAGE = "{few}", "{half}", "{many}", "{page}"
SECONDS, SHORT_SECONDS = {SOUND: 15, A_WORD: 1}, 3
SOUND_FILE = re.compile(r"made-up-(\d+)s\.wav")
"""Its name tells how long it is."""
MADE_UP = "made up by memfit"
"""How a made-up data set describes itself."""
PICTURE = "{picture}"
PICTURES = {
    PICTURE: ("RGB", (500, 375)), "{digit}": ("L", (28, 28)), "{small}": ("RGB", (32, 32)), "{mask}": ("L", (500, 375)),
    "{instances}": ("RGB", (500, 375)),
}  # fmt: skip
"""By mode and size."""
PICTURE_FILE = "{file}"
"""Its path."""
WORDS, FEW_WORDS, WORDS_OF_PAGES = 1000, 100, 4000
"""Pages of the web: programs look among them for one as long as what the model reads."""
HOLES = {SAID: WORDS_SAID, FEW: FEW_WORDS, HALF: WORDS // 2, MANY: WORDS, PAGE: WORDS_OF_PAGES}
SHORT = 6 * FEW_WORDS
LONG = (
    "text", "content", "context", "article", "document", "dialogue", "sentence", "sentence1", "premise", "review",
    "chosen", "rejected", "completion", "response", "output",
)  # fmt: skip
TALK = [{"role": "user", "content": FEW}, {"role": "assistant", "content": HALF}] * 3
"""Longer than what programs cut it to, and no answer alone."""
_TALKED = f"\n\nHuman: {FEW}\n\nAssistant: {MANY}"
THINGS = {
    "id": [*range(8)], "area": [5000.0] * 8, "bbox": [[40.0 * number, 30.0, 100.0, 50.0] for number in range(8)],
    "category": [0] * 8,
}  # fmt: skip
"""On a picture: eight, as boxes."""
_LANGUAGES = dict.fromkeys(("en", "de", "fr", "ro"), "")
_SPOKEN = {"audio": SOUND, "text": SAID, "sentence": SAID}
_ABOUT_A_VOICE = ("client_id", "path", "age", "gender", "accent", "locale", "segment", "variant")
COLUMNS: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"fleurs", {"id": 0, "path": "", "audio": SOUND, "transcription": SAID, "raw_transcription": SAID,
                 "num_samples": 0, "gender": 0, "lang_id": 0, "language": "", "lang_group_id": 0}),
    (r"minds.?14", {"path": "", "audio": SOUND, "transcription": SAID, "english_transcription": SAID, "intent_class": 0,
                    "lang_id": 0}),
    (r"superb.*\bks\b|speech_commands", {"file": "", "audio": A_WORD, "label": 0}),
    (r"superb.*\b(ic|er|si)\b", {"file": "", "audio": SOUND, "label": 0}),
    (r"voxpopuli", {"audio_id": "", "language": "", "audio": SOUND, "raw_text": SAID, "normalized_text": SAID}),
    (r"common_voice", {**_SPOKEN, **dict.fromkeys(_ABOUT_A_VOICE, ""), "up_votes": 0, "down_votes": 0}),
    (r"librispeech|superb|\basr\b", {"file": "", **_SPOKEN, "speaker_id": 0, "chapter_id": 0, "id": ""}),
    (r"mnist|svhn|usps", {"image": "{digit}", "label": 0}),
    (r"cifar.?100", {"img": "{small}", "fine_label": 0, "coarse_label": 0}),
    (r"cifar", {"img": "{small}", "label": 0}),
    (r"\bbeans\b", {"image_file_path": "", "image": PICTURE, "labels": 0}),
    (r"cats_vs_dogs", {"image": PICTURE, "labels": 0}),
    (r"cppe|object.?detection|fashionpedia|\bcoco\b.*20\d\d$",
     {"image_id": 0, "image": PICTURE, "width": 500, "height": 375, "objects": THINGS}),
    (r"ade20k.?mini|instance.?seg", {"image": PICTURE, "annotation": "{instances}",
                                     "semantic_class_to_id": {"background": 0, "class 1": 1, "class 2": 2}}),
    (r"sidewalk", {"pixel_values": PICTURE, "label": "{mask}"}),
    (r"scene_parse|ade20k", {"image": PICTURE, "annotation": "{mask}", "scene_category": 0}),
    (r"fill50k|controlnet|conditioning", {"image": PICTURE, "conditioning_image": PICTURE, "text": FEW}),
    (r"blip-captions|naruto|pokemon|image.*caption|flickr", {"image": PICTURE, "text": FEW}),
    (r"imagenet|food.?101|iiit|\bpets\b|oxford.?pets|flowers|stanford.?cars|eurosat|caltech",
     {"image": PICTURE, "label": 0}),
    (r"all-nli.*triplet", dict.fromkeys(("anchor", "positive", "negative"), "")),
    (r"all-nli.*pair-score", {"sentence1": "", "sentence2": "", "score": 0.5}),
    (r"all-nli.*pair$", {"anchor": "", "positive": ""}),
    (r"sentence-transformers/stsb", {"sentence1": "", "sentence2": "", "score": 0.5}),
    (r"quora-duplicates|quora.*pair-class", {"sentence1": "", "sentence2": "", "label": 0}),
    (r"gooaq", {"question": "", "answer": ""}),
    (r"natural-questions", {"query": "", "answer": ""}),
    (r"qnli", {"question": "", "sentence": "", "label": 0, "idx": 0}),
    (r"mrpc|rte|stsb|wnli", {"sentence1": "", "sentence2": "", "label": 0, "idx": 0}),
    (r"all-nli", {"premise": "", "hypothesis": "", "label": 0}),
    (r"mnli|snli|xnli|anli", {"premise": "", "hypothesis": "", "label": 0, "idx": 0}),
    (r"hellaswag", {"ctx": "", "endings": [""] * 4, "label": "0"}),
    (r"swag", {**dict.fromkeys(("sent1", "sent2", "ending0", "ending1", "ending2", "ending3"), ""), "label": 0}),
    (r"qqp", {"question1": "", "question2": "", "label": 0, "idx": 0}),
    (r"sst2|cola|glue", {"sentence": "", "label": 0, "idx": 0}),
    (r"squad", {"id": "", "title": "", "context": "", "question": "", "answers": {"text": [""], "answer_start": [0]}}),
    (r"kto|unpaired|feedback.*helpfulness", {"prompt": "", "completion": "", "label": True}),
    (r"prm800k|math.?shepherd", {"prompt": "", "completions": [""] * 8, "labels": [True] * 8}),
    (r"hh-rlhf", {"chosen": _TALKED, "rejected": _TALKED}),
    (r"ultrafeedback.*binarized|dpo|preference", {"prompt": "", "chosen": "", "rejected": ""}),
    (r"gsm8k", {"question": "", "answer": ""}),
    (r"alpaca|dolly", {"instruction": "", "input": "", "output": "", "text": ""}),
    (r"ultrachat|capybara|no_robots|smoltalk|chat", {"messages": TALK}),
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
LONGEST: tuple[tuple[str, dict[str, int]], ...] = (
    (r"(^|/|glue )mrpc$", {"sentence1": 40, "sentence2": 40}),
    (r"(^|/|glue )cola$", {"sentence": 45}),
    (r"(^|/|glue )sst2$", {"sentence": 55, "text": 55}),
    (r"(^|/|glue )stsb( |$)", {"sentence1": 60, "sentence2": 60}),
    (
        r"(^|/|glue )qqp$|quora-duplicates( |$)",
        {"question1": 130, "question2": 240, "sentence1": 130, "sentence2": 240, "anchor": 130, "positive": 240},
    ),
    (r"(^|/|glue )rte$", {"sentence1": 230, "sentence2": 50, "premise": 230, "hypothesis": 50}),
    (r"(^|/|glue )wnli$", {"sentence1": 80, "sentence2": 30}),
    (r"(^|/|glue )qnli$", {"question": 45, "sentence": 660}),  # what SQuAD has
    (r"(^|/)snli( |$)", {"premise": 85, "hypothesis": 65}),
    (
        r"(^|/|glue |multi_)(mnli|xnli)\w*( en)?$|(^|/)all-nli( |$)",
        {
            "premise": 405,
            "hypothesis": 75,
            "sentence1": 405,
            "sentence2": 75,
            "anchor": 405,
            "positive": 75,
            "negative": 75,
        },
    ),
    (r"(^|/)imdb( plain_text)?$", {"text": 2500}),
    (r"(^|/)yelp_(review_full|polarity)( \w+)?$", {"text": 1100}),
    (r"(^|/)ag_news( default)?$", {"text": 180}),
    (r"^(dair-ai/)?emotion( split)?$", {"text": 70}),
    (r"(^|/)rotten_tomatoes( default)?$", {"text": 60}),
    (r"(^|/)banking77( default)?$", {"text": 80}),
    (r"(^|/)squad(_v2)?( \w+)?$", {"context": 660, "question": 45}),
    (r"(^|/)conll2003( conll2003)?$", {"tokens": 16}),
    (r"(^|/)samsum( samsum)?$", {"dialogue": 810, "summary": 70}),
    (r"(^|/)cnn_dailymail( \d\.0\.0)?$", {"article": 2400}),
)
"""By the whole name: words of the longest text of the public data set, rounded up. Dynamic padding makes a batch as
long as its longest row, so a plan is as large as the largest batch. A row of CoNLL has eight texts as its tokens."""
LANGUAGES = re.compile(r"(?<![a-z])([a-z]{2,3})-([a-z]{2,3})(?![a-z])")
CLASSES = (
    (r"tiny.?imagenet", 200), (r"imagenette", 10), (r"imagenet", 1000), (r"food.?101", 101), (r"cifar.?100", 100),
    (r"mnist|svhn|usps|cifar|eurosat", 10), (r"beans", 3), (r"iiit|\bpets", 37), (r"flowers", 102), (r"cars", 196),
    (r"minds.?14", 14), (r"superb|speech_commands", 36), (r"fleurs", 102),
    (r"stsb", 0), (r"mnli|snli|xnli|anli|all-nli", 3), (r"cppe", 5), (r"sidewalk", 35), (r"scene_parse|ade20k", 150),
    (r"hellaswag|\bswag|ag_news", 4), (r"emotion", 6), (r"conll", 9),
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
    return as_long_as_published(name, {column: _filled(value, column) for column, value in row.items()})


def longest_of(name: str) -> dict[str, int]:
    """Words by column, of a public data set; none of one that is not known."""
    return next((words for names, words in LONGEST if re.search(names, name, re.IGNORECASE)), {})


def as_long_as_published(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    longest = longest_of(name)
    return {column: _of_words(value, longest[column]) if column in longest else value for column, value in row.items()}


def _of_words(value: Any, words: int) -> Any:
    if isinstance(value, list):
        return [_of_words(each, words) for each in value]
    return re.sub("(word )+", "word " * words, value) if isinstance(value, str) else value


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


def columns_told(name: str, row: Mapping[str, Any]) -> str:
    """With what bounds them."""
    found = list(row.values())
    if published := [row[column] for column in longest_of(name) if column in row]:
        return f"{', '.join(row)}, rows of up to {_all_words(published):,} words, as the public set's longest"
    seconds = [SECONDS[each] for each in found if isinstance(each, str) and each in SECONDS]
    if seconds:
        return f"{', '.join(row)}: {seconds[0]} second{'s' * (seconds[0] > 1)} of sound, {WORDS_SAID} words"
    pictures = ["x".join(map(str, PICTURES[each][1])) for each in found if isinstance(each, str) and each in PICTURES]
    if pictures:
        return f"{', '.join(row)}: pictures of {pictures[0]}"
    return f"{', '.join(row)}, up to {_most_words(found):,} words a text"


def _most_words(value: Any) -> int:
    if isinstance(value, (list, dict)):
        return max(map(_most_words, value.values() if isinstance(value, dict) else value), default=0)
    return value.count("word ") if isinstance(value, str) else 0


def _all_words(value: Any) -> int:
    return sum(map(_all_words, value)) if isinstance(value, list) else str(value).count("word ")


def data_sets_of(name: str, row: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """By split; `data` is the package datasets."""
    pictures = {column: each for column, each in row.items() if isinstance(each, str) and each in PICTURES}
    sounds = {column: SECONDS[each] for column, each in row.items() if isinstance(each, str) and each in SECONDS}
    stored = {**row, **{column: {"bytes": picture(kind)} for column, kind in pictures.items()},
              **{column: {"path": f"made-up-{seconds}s.wav"} for column, seconds in sounds.items()}}  # fmt: skip
    is_short = not pictures and max(len(str(each)) for each in row.values()) < SHORT
    rows = FEW_ROWS if sounds else SHORT_ROWS if is_short else ROWS
    if re.search("mnli", name, re.IGNORECASE):
        matched = [f"{split}_{kind}" for split in ("validation", "test") for kind in ("matched", "mismatched")]
        rows = rows | dict.fromkeys(matched, rows["test"])
    classes = next(count for words, count in CLASSES if re.search(words, name, re.IGNORECASE))
    made = {}
    for split, count in rows.items():
        either = (*[stored] * (SHORT_EVERY - 1), _shortened(stored))
        each = _with_classes(data.Dataset.from_list([either[at % SHORT_EVERY] for at in range(count)]), data, classes)
        for column in pictures:
            each = each.cast_column(column, data.Image())
        for column in sounds:
            each = each.cast_column(column, data.Audio(sampling_rate=SAMPLING_RATE))
        each.info.description = MADE_UP
        made[split] = each
    return made


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_shortened(each) for each in value]
    if isinstance(value, str) and SOUND_FILE.fullmatch(value):
        return f"made-up-{min(seconds_of(value), SHORT_SECONDS)}s.wav"
    return re.sub("(word )+", _fewer, value) if isinstance(value, str) else value


def _fewer(words: re.Match[str]) -> str:
    return "word " * max(words[0].count("word ") // SHORT_PART, 1)


def _with_classes(made: Any, data: Any, count: int) -> Any:
    """Whole numbers that stand for classes, with names."""
    if not count:
        return made.cast_column("label", data.Value("float32")) if "label" in made.features else made
    kind = data.ClassLabel(names=[f"class {number}" for number in range(count)])
    for column in OF_CLASSES:
        if column in made.features and getattr(made.features[column], "dtype", None) == "int64":
            made = made.cast_column(column, kind)
    if "objects" in made.features:
        made = made.cast_column("objects", {**made.features["objects"], "category": data.Sequence(kind)})
    return made.cast_column("ner_tags", data.Sequence(kind)) if "ner_tags" in made.features else made


def picture(kind: str) -> bytes:
    from PIL import Image

    mode, size = PICTURES[kind]
    stored, made = io.BytesIO(), Image.new(mode, size)
    for number in range(1, 9 if kind == "{instances}" else 1):  # class and number of a thing are its colours
        made.paste((1 + number % 2, number, 0), (55 * number, 40, 55 * number + 50, 340))
    made.save(stored, "PNG")
    return stored.getvalue()


def seconds_of(file: str) -> int:
    """0: no sound that was made up."""
    found = SOUND_FILE.fullmatch(file)
    return int(found[1]) if found else 0


def sound(sampling_rate: int | None, path: str) -> dict[str, Any]:
    """As `datasets` gave it before it had a decoder of its own."""
    import numpy as np

    rate = sampling_rate or SAMPLING_RATE
    return {"path": path, "array": np.zeros(seconds_of(path) * rate, dtype=np.float32), "sampling_rate": rate}
