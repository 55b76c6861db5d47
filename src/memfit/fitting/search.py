"""The smallest set of levers with which a job fits, found with few predictions.

Grow: where the job does not fit, its peak says what has to become smaller, and the cheapest lever that lowers any of
that is added; so on until it fits. A lever that cannot lower the peak as it is now cannot make it fit, whatever else
is added, so nothing cheap is passed over for good.

Shrink: with all that is cheaper than the dearest of them added, each lever is left out again, or made weaker, the
dearest first, wherever the others do without it. What is left has no change too many: take one away and the job no
longer fits. That is predicted too, not concluded.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memfit.errors import MemfitError
from memfit.fitting.forecast import Forecast, Forecasts
from memfit.fitting.levers import CACHED, COSTS, Lever, apply
from memfit.jobs.workload import Workload
from memfit.units import MiB

Set = tuple[Lever, ...]
"""Of one group at most one; the cheapest first."""

NOTHING_TO_LOWER = 16 * MiB
"""Less than this of a category at the peak is not worth a change."""
STRONGEST_FIRST = ("micro-batch", "sequence", "rank", "beams", "new tokens", "windows")
"""Groups with many steps: whether the last one is enough is asked first, then how few will do."""


@dataclass(frozen=True)
class Solution:
    levers: Set
    forecast: Forecast
    """Of the job with all of them."""
    refused: tuple[Lever, ...] = ()
    """That could have helped, and only do not go together with these."""


class Search:
    def __init__(self, workload: Workload, levers: Sequence[Lever], forecasts: Forecasts) -> None:
        self.workload, self.forecasts = workload, forecasts
        self.levers = [lever for lever in levers if lever.missing is None]
        self.groups: dict[str, list[Lever]] = {}
        for lever in self.levers:
            self.groups.setdefault(lever.group, []).append(lever)
        self.refused: dict[str, str] = {}
        """Levers that cannot be planned even alone, and why: by name."""
        self.raising: set[str] = set()
        """Levers with which a peak was higher."""

    def forecast(self, levers: Iterable[Lever]) -> Forecast:
        return self.forecasts.ask(apply(self.workload, levers))

    def glance(self, levers: Iterable[Lever]) -> Forecast:
        """A cheap lower bound if that already fails, else the full forecast."""
        return self.forecasts.glance(apply(self.workload, levers))

    def fits(self, levers: Iterable[Lever]) -> bool:
        try:
            return self.glance(levers).fits
        except MemfitError:  # a change that does not go without another
            return False

    def smallest(self, *, start: Set = (), without: Iterable[str] = ()) -> Solution | None:
        """With no lever of the groups in `without`; None where all levers together are not enough. A set to `start`
        from is one that is known to be of use."""
        banned = set(without)
        grown = next((each for each in self._ways(start, banned) if each.forecast.fits), None)
        return None if grown is None else self.shrunk(self._with_all_that_is_cheaper(grown, banned))

    def nearest(self) -> Solution:
        """The solution closest to fitting."""
        ways = [Solution(each.levers, self.forecast(each.levers), each.refused) for each in self._ways((), set())]
        return min(ways, key=lambda each: each.forecast.device_bytes)

    def _ways(self, start: Set, banned: set[str]) -> Iterator[Solution]:
        """Where two levers do not go together the dearer may be the one to take, so it is tried again without the
        other."""
        found = self.grown(start=start, without=banned)
        yield found
        in_the_way = None if found.forecast.fits else self._in_the_way(found)
        if in_the_way is not None:
            other = self.grown(without={*banned, in_the_way.group})
            yield dataclasses.replace(other, refused=(*other.refused, in_the_way))

    def _in_the_way(self, found: Solution) -> Lever | None:
        """The dearest that costs time and does not go with one that was refused."""
        chosen = [lever for lever in reversed(found.levers) if lever.cost == "time"]
        pairs = ((lever, other) for lever in chosen for other in found.refused)
        refused = (lever for lever, other in pairs if self.forecasts.refusal(apply(self.workload, [lever, other])))
        return next(refused, None)

    # -- growing -------------------------------------------------------------------------------------------------------

    def grown(self, *, start: Set = (), without: Iterable[str] = ()) -> Solution:
        """Until it fits, or nothing is left that could lower the peak."""
        banned, found = set(without), Solution(start, self.glance(start))
        useless: set[str] = set()
        refused: dict[str, Lever] = {}
        while not found.forecast.fits:
            lever = self._next(found, banned, useless | set(refused))
            if lever is None:
                break
            larger = self._with(found.levers, lever)
            try:
                forecast = self.glance(larger)
                lowers = self._is_lower(forecast, found.forecast)
            except MemfitError:
                refused[lever.name] = lever
                self._see_whether_it_goes_alone(lever)
                continue
            if lowers:
                found, useless = Solution(larger, forecast), set()
            else:
                useless.add(lever.name)
                if forecast.device_bytes > found.forecast.device_bytes:
                    self.raising.add(lever.name)
        together = tuple(lever for lever in refused.values() if lever.name not in self.refused)
        return Solution(found.levers, found.forecast, together)

    def _is_lower(self, forecast: Forecast, before: Forecast) -> bool:
        """A bound that is no higher than a forecast says little of the two."""
        if before.is_bound and not forecast.is_bound and forecast.device_bytes >= before.device_bytes:
            before = self.forecasts.ask(before.workload)
        if forecast.is_bound and not before.is_bound and forecast.device_bytes < before.device_bytes:
            forecast = self.forecasts.ask(forecast.workload)
        return forecast.device_bytes < before.device_bytes

    def _see_whether_it_goes_alone(self, lever: Lever) -> None:
        refusal = self.forecasts.refusal(apply(self.workload, [lever]))
        if refusal is not None:
            self.refused[lever.name] = refusal.message

    def _next(self, found: Solution, banned: set[str], useless: set[str]) -> Lever | None:
        """The cheapest that is stronger than what the set has, and that could lower the peak."""
        for lever in self.levers:
            group = self.groups[lever.group]
            passed_over = lever.group in banned or lever.name in useless or lever.name in self.refused
            if passed_over or not self._is_stronger(lever, found.levers):
                continue
            if lever.group in STRONGEST_FIRST and lever is not group[-1] and group[-1].name not in useless:
                continue
            if can_lower(lever, found.forecast):
                return lever
        return None

    def _is_stronger(self, lever: Lever, chosen: Set) -> bool:
        group = self.groups[lever.group]
        return all(each.group != lever.group or group.index(each) < group.index(lever) for each in chosen)

    def _with(self, chosen: Set, lever: Lever) -> Set:
        return self.ordered([each for each in chosen if each.group != lever.group] + [lever])

    def ordered(self, levers: Iterable[Lever]) -> Set:
        """The cheapest first."""
        return tuple(sorted(levers, key=self.levers.index))

    # -- shrinking -----------------------------------------------------------------------------------------------------

    def _with_all_that_is_cheaper(self, found: Solution, banned: set[str]) -> Solution:
        """What did not change the peak by itself may still spare a dearer change: shrinking tells."""
        dearest = max(self.levers.index(lever) for lever in found.levers)
        groups = {lever.group for lever in found.levers} | banned
        more = found.levers
        for name, group in self.groups.items():
            of_no_use = self.raising | set(self.refused)
            cheaper = [lever for lever in group if self.levers.index(lever) < dearest and lever.name not in of_no_use]
            if name not in groups and cheaper:
                more = self._with(more, cheaper[-1])
        return Solution(more, found.forecast) if more != found.levers and self.fits(more) else found

    def shrunk(self, found: Solution) -> Solution:
        chosen = found.levers
        while True:
            smaller = chosen
            for lever in reversed(chosen):
                smaller = self._as_little_as_will_do(smaller, lever)
            if smaller == chosen:
                return Solution(chosen, self.forecast(chosen))
            chosen = smaller

    def fewer(self, found: Solution) -> Solution | None:
        """One change less that costs time, where others of the set that do go as far as they can instead."""
        for lever in reversed(found.levers):
            others = tuple(each for each in found.levers if each is not lever)
            further = self.ordered(self._strongest(each) if each.cost == "time" else each for each in others)
            if lever.cost == "time" and further != others and self.fits(further):
                return self.shrunk(Solution(further, self.forecast(further)))
        return None

    def _strongest(self, lever: Lever) -> Lever:
        """Of its group, at the same cost."""
        alike = [each for each in self.groups[lever.group] if each.cost == lever.cost]
        return next((each for each in reversed(alike) if each.name not in self.refused), lever)

    def one_step_back(self, chosen: Set) -> tuple[Lever, Set] | None:
        """The set with the next weaker lever in place of its last one; None where there is none."""
        last = chosen[-1]
        group = self.groups[last.group]
        weaker = [each for each in group[: group.index(last)] if each.name not in self.refused]
        return (weaker[-1], self._with(chosen[:-1], weaker[-1])) if weaker else None

    def _as_little_as_will_do(self, chosen: Set, lever: Lever) -> Set:
        """The lever left out; else the weakest of its group that will do."""
        others = tuple(each for each in chosen if each is not lever)
        if self.fits(others):
            return others
        group = self.groups[lever.group]
        weaker = [each for each in group[: group.index(lever)] if each.name not in self.refused]
        choices = [self._with(others, each) for each in weaker]
        weakest = bisect_left(choices, True, key=self.fits)
        return choices[weakest] if weakest < len(choices) else chosen


def can_lower(lever: Lever, forecast: Forecast) -> bool:
    """Whether the peak has any of what the lever lowers."""
    if lever.only_in is not None and lever.only_in != forecast.at_peak.phase:
        return False
    alive = {**forecast.breakdown, CACHED: forecast.cached_bytes}
    return any(alive.get(name, 0) >= NOTHING_TO_LOWER for name in lever.lowers)


def dearness(levers: Iterable[Lever]) -> tuple[int, ...]:
    """For sorting: how many changes of the dearest kind, then of the next one, and so on."""
    kinds = [lever.cost for lever in levers]
    return tuple(kinds.count(cost) for cost in reversed(COSTS))
