"""Whether every key of a config file is read, and as what."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from memfit.advice.preflight.finding import Finding, Line
from memfit.advice.preflight.situation import Situation
from memfit.jobs.training.config import TrainConfig
from memfit.jobs.training.config_file import find_config, load_config, parse_yaml
from memfit.jobs.training.config_keys import SECTIONS, canonical
from memfit.jobs.training.config_names import LOOSE, SECTION_ALIASES

KEYS = Line("config", "keys")
SHOWN = 6


@dataclass(frozen=True)
class Read:
    """A key of the file, and memfit's own name of what it sets."""

    key: str
    setting: str

    @property
    def elsewhere(self) -> bool:
        """It stands in a section that is not its setting's."""
        *sections, _ = self.key.split(".")
        own = [SECTION_ALIASES.get(each, each) for each in sections if each not in LOOSE]
        return bool(own) and own[0] in SECTIONS and self.setting.split(".")[0] != own[0]


def load(said: str, sets: Iterable[str]) -> tuple[TrainConfig, tuple[Read, ...]]:
    config = load_config(said, sets=sets)
    _, text, where = find_config(said)
    given = canonical(parse_yaml(text, where))
    return config, tuple(Read(each.key, setting) for setting, each in given.items())


def keys(situation: Situation) -> Iterator[Finding]:
    config, read = situation.config, situation.asked.keys
    for remark in config.remarks:
        yield KEYS.warning(remark, "take it out of the file")
    moved = [each for each in read if each.elsewhere]
    said = "; ".join(f"{each.key} is read as {each.setting}" for each in moved[:SHOWN])
    found = f"{len(read)} settings, each is read" + (f"; {said}" if moved else "")
    yield KEYS.ok(found, elsewhere={each.key: each.setting for each in moved})
