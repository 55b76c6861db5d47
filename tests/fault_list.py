"""The faults that `faults.py` puts in: where, what becomes of what, and which tests should notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    """Below src/memfit."""
    piece: str
    """Source text that the file has exactly once."""
    becomes: str
    tests: tuple[str, ...]
    """Files below tests/."""
    harmless: str = ""
    """Why nobody could notice."""

    @property
    def room(self) -> str:
        parts = self.file.split("/")
        return parts[1] if parts[0] == "jobs" and len(parts) > 2 else parts[0].removesuffix(".py")


def _in(file: str, *tests: str) -> _Places:
    return _Places(file, tests)


@dataclass(frozen=True)
class _Places:
    file: str
    tests: tuple[str, ...]

    def __call__(self, name: str, piece: str, becomes: str, *, harmless: str = "") -> Fault:
        return Fault(name, self.file, piece, becomes, self.tests, harmless)


_SAVED = _in("jobs/pruning/saved_runs.py", "jobs/pruning/test_durability.py", "jobs/pruning/test_output.py")
_OUTPUT = _in("jobs/pruning/output.py", "jobs/pruning/test_durability.py", "jobs/pruning/test_output.py")
_STREAMING = _in("jobs/pruning/streaming.py", "jobs/pruning/test_streaming.py", "jobs/pruning/test_durability.py")
_SWEEP = _in("jobs/pruning/sweep.py", "jobs/pruning/test_durability.py", "jobs/pruning/test_output.py")

PRUNING = [
    _SAVED("a journal's line is not synced", "        os.fsync(self._file)\n", ""),
    _SAVED("the first line of a journal is not synced to its folder", "        to_disk(self.path.parent)\n", ""),
    _SAVED("half a line of the journal stays", "        os.ftruncate(self._file, self._end)\n", ""),
    _SAVED("a block out of order is believed", 'elif line.get("block") == len(made.blocks):', 'elif "block" in line:'),
    _SAVED("half a line of the journal is read", 'if raw.endswith(b"\\n") else None', "if raw else None"),
    _SAVED("another format of the journal is read", "!= FORMAT", "is None"),
    _SAVED("a resumed run may have other settings", "        if other:\n", "        if False:\n"),
    _SAVED(
        "blocks are not forgotten before their files go",
        "            os.ftruncate(stream.fileno(), end)\n",
        "            pass\n",
    ),
    _OUTPUT(
        "a block's line is written before its bytes are on disk",
        "            self._sync(files)\n            self.journal.add_block(block, checksum, facts)\n",
        "            self.journal.add_block(block, checksum, facts)\n            self._sync(files)\n",
    ),
    _OUTPUT("a block's bytes are not synced", "            self._sync(files)\n", ""),
    _OUTPUT(
        "the journal goes before the folder is renamed",
        "            self.working.rename(self.save)\n            to_disk(self.save.parent)\n",
        "            self.journal.delete()\n            self.working.rename(self.save)\n"
        "            to_disk(self.save.parent)\n",
    ),
    _OUTPUT(
        "the folder is renamed before its files are on disk",
        "            self._sync(range(len(self._files)))\n            self.close()\n",
        "            self.close()\n",
    ),
    _OUTPUT("the rename is not synced", "            to_disk(self.save.parent)\n", ""),
    _OUTPUT(
        "the folder's names are not synced before the rename",
        "            self.close()\n            to_disk(self.working)\n",
        "            self.close()\n",
    ),
    _OUTPUT(
        "a converted block is written to the wrong byte",
        "return start // piece.slot.dtype.itemsize * dtype.itemsize, as",
        "return start, as",
    ),
    _OUTPUT(
        "a tensor that is not pruned is copied to the wrong byte",
        "_pwrite(descriptor, part, target.start + start)",
        "_pwrite(descriptor, part, target.start)",
    ),
    _OUTPUT("the rest is copied again after it was done", 'if self.journal.settings.get("rest"):', "if False:"),
    _OUTPUT(
        "a block that changed on disk is taken as it is",
        "        if self.total != self.output.journal",
        "        if False and self.total != self.output.journal",
    ),
    _OUTPUT("a file of another size is resumed", " or path.stat().st_size != size", ""),
    _OUTPUT(
        "an old result goes before the new one is in place",
        "                self.save.rename(replaced_of(self.save))\n",
        "                shutil.rmtree(self.save)\n",
    ),
    _OUTPUT("the checksum leaves out the last bytes", ' + int.from_bytes(data[whole:], "little")', ""),
    _OUTPUT("the source's times are no part of its identity", " {stats.st_mtime_ns}", ""),
    _SAVED("an unfinished run is thrown away unasked", "        if not resume:\n", "        if False:\n"),
    _OUTPUT("the index counts other bytes", '"total_size": sum(t.nbytes for', '"total_size": 1 + sum(t.nbytes for'),
    _STREAMING("a converted read starts at the wrong byte", "start // item * stored.itemsize", "start"),
    _STREAMING("a converted read is shown as the model has it", "seen(name, as_bytes(raw))", "seen(name, out)"),
    _STREAMING("a chunk goes to the wrong place", "read(as_bytes(room), start)", "read(as_bytes(room), number)"),
    _STREAMING("a place is filled before it is written", "            written.result()\n", "            pass\n"),
    _STREAMING(
        "an upload's buffer is filled while it is copied",
        "            finished(self._copied[number % 2])\n",
        "",
        harmless="on the CPU, where tests run, a copy is done when it returns",
    ),
    _STREAMING("what goes wrong while writing is kept quiet", "            going.result()\n", "            pass\n"),
    _STREAMING("the last part of a download is that before", "number + 1 < len(starts)", "number + 2 < len(starts)"),
    _SWEEP("a resumed run has other micro-batches", "before or made.micro_batch", "made.micro_batch"),
    _SWEEP(
        "the micro-batches are not remembered",
        '            self.output.remember("micro_batch", size)\n',
        "            pass\n",
    ),
    _SWEEP(
        "outliers are counted again on resume", "self.engine.team.tell(before) or self._outliers()", "self._outliers()"
    ),
    _SWEEP("finished blocks are pruned again", "if index < done:", "if index < done - 1:"),
]

_REPLAY = _in("replay/replay.py", "replay/test_replay_boundaries.py", "replay/test_replay.py")
_ROUNDING = _in("replay/timeline.py", "analysis/test_observed.py")
_TIMELINE = _in("replay/timeline.py", "replay/test_replay_boundaries.py", "replay/test_replay.py")
_ALLOCATOR = _in("replay/allocator.py", "replay/test_replay_boundaries.py", "replay/test_allocator.py")

REPLAY = [
    _REPLAY(
        "reserved after an OOM stays at the old level",
        "        reserved[progress.event :] = stats.reserved  # a failed request has released what it could\n",
        "",
    ),
    _REPLAY(
        "the margin of the smallest capacity is not tried",
        "if margin >= ample or (outcome := self.outcome(margin)).fits:",
        "if margin >= ample or (outcome := self.outcome(high)).fits:",
    ),
    _REPLAY("a refused capacity is reused", "capacity < self.smallest_refusal)", "capacity <= self.smallest_refusal)"),
    _REPLAY(
        "the reached peak is not reused",
        "return self.reserved_peak <= capacity and",
        "return self.reserved_peak < capacity and",
    ),
    _REPLAY("allocated after an OOM goes on", "        changes[progress.event :] = 0\n", ""),
    _REPLAY(
        "expandable segments settle ranges of capacities",
        "self._settles_ranges = not config.expandable_segments",
        "self._settles_ranges = True",
    ),
    _TIMELINE(
        "a peak is the last event that reaches it",
        "at = int(column.argmax())",
        "at = len(column) - 1 - int(column[::-1].argmax())",
    ),
    _TIMELINE(
        "a peak at the beginning is laid on the first event",
        "return at if column[at] > before else",
        "return at if column[at] >= before else",
    ),
    _REPLAY(
        "a completed free is completed again",
        "elif self.waits_at.pop(subject, None) == waits:",
        "elif self.waits_at.pop(subject, None) is not None:",
    ),
    _REPLAY("a twin forgets what waits", "        other.waits_at = dict(self.waits_at)\n", ""),
    _ROUNDING("power-of-two rounding is left out of recordings", "max(config.roundup_power2_divisions) <= 1", "True"),
    _ALLOCATOR("oversize release claims success", "return released >= wanted", "return True"),
    _ALLOCATOR("oversize release goes on after enough", "if released >= wanted or block.size", "if block.size"),
    _ALLOCATOR(
        "a block of exactly max_split_size is not oversize",
        "if size < self._max_split <= blocks[at].size:",
        "if size < self._max_split < blocks[at].size:",
    ),
    _ALLOCATOR(
        "a remainder of exactly 1 MiB is split off",
        "splits = rest > self._small_size and",
        "splits = rest >= self._small_size and",
    ),
    _ALLOCATOR("retries are not counted", "                self.stats.num_alloc_retries += 1\n", ""),
    _ALLOCATOR(
        "a pending block is lost in a twin",
        "        other.pending = {twins[block]: None for block in self.pending}\n",
        "",
    ),
    _in("replay/driver.py", "replay/test_replay_boundaries.py", "replay/test_allocator.py")(
        "the driver remembers its largest refusal",
        "min(needed, self.smallest_refusal or needed)",
        "max(needed, self.smallest_refusal or needed)",
    ),
    _in("replay/driver.py", "replay/test_replay_boundaries.py", "replay/test_allocator.py")(
        "ranges that touch do not merge", "if following == end and self._held[end][1]:", "if False:"
    ),
]

_FAMILY = _in("planning/interpolation.py", "planning/test_family_guards.py")
_SHAPES = _in(
    "extrapolation/shapes.py",
    "planning/test_family_guards.py",
    "extrapolation/test_shapes.py",
)
_CORNERS = _in("planning/interpolation.py", "planning/test_family_guards.py", "planning/test_corners.py")
_FEW = _in("planning/few.py", "planning/test_host_facts.py")

PLANNING = [
    _FAMILY(
        "every length is among the traced ones",
        "return any(_place(point[LENGTH], numbers) == place for point in known.piece.points)",
        "return True",
    ),
    _FAMILY(
        "a contradicted piece is believed",
        "if len(around) != 1 or around[0].contradicted or not",
        "if len(around) != 1 or not",
    ),
    _FAMILY(
        "pieces are never contradicted",
        "known.contradicted = any(known.piece.surrounds(other) for other in others)",
        "known.contradicted = False",
    ),
    _FAMILY(
        "thresholds of generation are not shifted by the new tokens",
        "found |= {number - self.work.new_tokens for number in found}",
        "pass",
    ),
    _in("planning/interpolation.py", "planning/test_host_facts.py")(
        "what lies on the host is forgotten in a family",
        "Trace(facts={HOST: recipe.trace.facts[HOST]} if HOST in recipe.trace.facts else {})",
        "Trace()",
    ),
    _FAMILY("two pieces around a point are one", "if len(around) != 1 or", "if not around or"),
    _FAMILY(
        "a number of the config and the next one are one place",
        "return bisect_left(among, number), bisect_right(among, number)",
        "return bisect_left(among, number), bisect_left(among, number)",
    ),
    _FAMILY("parts of different kinds are put together", "if near.context.key != far.context.key:", "if False:"),
    _FAMILY("lengths are not divided at a window", "                self._divide()\n", "                pass\n"),
    _FAMILY("a family is never given up", "                self.given_up = str(why)\n", "                pass\n"),
    _FAMILY("the card is no part of a family", "platform.facts(compiled=False)]", "1]"),
    _FAMILY("pruning has a family", 'or work.kind == "prune" or work.is_compiled', "or work.is_compiled"),
    _SHAPES("one spare point is enough", "SPARE_POINTS = 2", "SPARE_POINTS = 1"),
    _SHAPES("of two polynomials the first is taken", "return found[0] if len(found) == 1 else None", "return found[0]"),
    _SHAPES(
        "three corners surround a point",
        "all(any(side[i] and side[j] for side in around) for i in (0, 1) for j in (2, 3))",
        "any(all(any(side[i] and side[j] for side in around) for j in (2, 3)) for i in (0, 1))",
    ),
    _SHAPES("divisibility does not matter", "return min(twos) <= _twos(value, most) <= max(twos)", "return True"),
    _SHAPES("what is told is not held against what was traced", ") != traced.fingerprint:", ") is None:"),
    _SHAPES(
        "fractions are rounded",
        "if coefficient.denominator != 1 or not coefficient:",
        "if not coefficient:",
        harmless="what is found is held against every point",
    ),
    _SHAPES("sizes below nothing are told", "if min(sizes, default=0) < 0 or max", "if max"),
    _CORNERS(
        "points elsewhere pay for corners",
        "coming = sum(low <= b <= high and short <= s <= long for b, s in",
        "coming = sum(True for b, s in",
    ),
    _CORNERS(
        "a line out of reach stays", "                self._lines[axis].discard(line)\n", "                pass\n"
    ),
    _FEW("host bytes of the optimizer are scaled by blocks", "optimizer=of_all)", "optimizer=more)"),
    _FEW(
        "host bytes of frozen weights are those of few blocks",
        "scaled(trace.facts, weights=more, activations=more,",
        "scaled(trace.facts, activations=more,",
    ),
    _FEW(
        "host bytes of activations are those of few blocks",
        "scaled(trace.facts, weights=more, activations=more,",
        "scaled(trace.facts, weights=more,",
    ),
    _FEW("models that grow otherwise are told from few blocks", "!= parameters:", "is None:"),
    _in("planning/traced.py", "planning/test_host_facts.py")(
        "host bytes of another batch are those of the traced one", "activations=tokens)", "activations=1)"
    ),
]

_SEARCH = _in("fitting/search.py", "fitting/test_search_boundaries.py", "fitting/test_fit_search.py")
_LEVERS = _in("fitting/levers.py", "fitting/test_lever_flags.py", "fitting/test_search_boundaries.py")
_LADDER = _in("fitting/ladder.py", "fitting/test_fit_ladder.py")
_FORECAST = _in("fitting/forecast.py", "fitting/test_search_boundaries.py")

FITTING = [
    _SEARCH(
        "only_in of a lever is ignored",
        "if lever.only_in is not None and lever.only_in != forecast.at_peak.phase:",
        "if False:",
    ),
    _SEARCH("a lever that saves nothing is kept", "            if lowers:\n", "            if True:\n"),
    _SEARCH(
        "a lever is not left out where the others do", "        if self.fits(others):\n            return others\n", ""
    ),
    _SEARCH(
        "of a group the strongest lever is kept",
        "        choices = [self._with(others, each) for each in weaker]\n",
        "        choices = []\n",
    ),
    _SEARCH("16 MiB is nothing to lower", ">= NOTHING_TO_LOWER for", "> NOTHING_TO_LOWER for"),
    _SEARCH(
        "what raised a peak is taken again",
        "of_no_use = self.raising | set(self.refused)",
        "of_no_use = set(self.refused)",
    ),
    _SEARCH(
        "a refused lever is tried again",
        "or lever.name in useless or lever.name in self.refused",
        "or lever.name in useless",
        harmless="it is refused again: one more question, the same answer",
    ),
    _SEARCH(
        "the nearest is the farthest",
        "return min(ways, key=lambda each: each.forecast.device_bytes)",
        "return max(ways, key=lambda each: each.forecast.device_bytes)",
    ),
    _SEARCH(
        "a lever weaker than the chosen one is added",
        "group.index(each) < group.index(lever) for",
        "group.index(each) != group.index(lever) for",
        harmless="a weaker one takes more, and is dropped again: one more question, the same answer",
    ),
    _SEARCH("a banned group is used", "passed_over = lever.group in banned or lever.name", "passed_over = lever.name"),
    _LEVERS("the fused optimizer's flag of the Trainer is wrong", 'optim="adamw_torch_fused"', 'optim="adamw_fused"'),
    _LEVERS("the 8-bit optimizer's flag of the Trainer is wrong", 'optim="adamw_bnb_8bit"', 'optim="adamw_bnb_8bits"'),
    _LEVERS(
        "the micro-batch's flag of the Trainer is wrong",
        "per_device_train_batch_size={rows}, gradient",
        "per_device_batch_size={rows}, gradient",
    ),
    _LEVERS(
        "the Trainer accumulates another number of times",
        'f"per_device_train_batch_size={rows}, gradient_accumulation_steps={steps}"',
        'f"per_device_train_batch_size={rows}, gradient_accumulation_steps={rows}"',
    ),
    _LEVERS(
        "checkpointing's switch of the Trainer is wrong",
        'gradient_checkpointing_kwargs={"use_reentrant": False}',
        'gradient_checkpoint_kwargs={"use_reentrant": False}',
    ),
    _LEVERS("the precision's flag of the Trainer is wrong", '"bf16=True"', '"bfloat16=True"'),
    _LEVERS(
        "the sharding's flag of the Trainer is wrong", 'fsdp_config={"version": 2,', 'fsdp_configuration={"version": 2,'
    ),
    _LEVERS("Liger's flag of the Trainer is wrong", "or use_liger_kernel=True", "or use_liger=True"),
    _LEVERS("the length's flag of memfit is wrong", 'f"--seq-len {length}{key}"', 'f"--sequence-length {length}{key}"'),
    _LEVERS("the rank's key of a config is wrong", '(method.rank)"', '(lora.rank)"'),
    _LEVERS(
        "the fused optimizer is worth a try in every phase",
        'lowers=("temporaries",), only_in="step",',
        'lowers=("temporaries",),',
    ),
    _LEVERS("the smallest rank is halved once more", "and rank >= LOWEST_RANK", "and rank >= LOWEST_RANK // 2"),
    _LEVERS(
        "the shortest sequence is cut once more", "if SHORTEST <= length < work.seq_len:", "if length < work.seq_len:"
    ),
    _LEVERS(
        "what lies on the host is forgotten",
        "on_host = workload.offload  # what",
        "on_host = ()  # what",
    ),
    _LEVERS("checkpointing is a lever where it is on", "    if work.grad_checkpointing:\n        return\n", ""),
    _LADDER("Medium leaves 15 %", '"Medium": 0.2', '"Medium": 0.15'),
    _LADDER("Safe leaves a quarter", '"Safe": 0.3', '"Safe": 0.25'),
    _LADDER("Aggressive leaves 5 %", '"Aggressive": 0.1', '"Aggressive": 0.05'),
    _LADDER(
        "the rung above is the last one",
        "self._ask(higher[0]) if higher else None",
        "self._ask(higher[-1]) if higher else None",
    ),
    _LADDER(
        "the risk of longer rows is not told",
        'longer = [f"rows longer than {self.longest} tokens"] if ends else []',
        "longer = []",
    ),
    _LADDER(
        "rows of any length are a risk", "self.longest < LONGER[-1] * length", "self.longest <= LONGER[-1] * length"
    ),
    _LADDER(
        "what another program takes is the whole card", "{gib(max(spare, 0))}", "{gib(self.forecast.capacity_bytes)}"
    ),
    _LADDER(
        "a rung's time is not beside that of the first",
        "round(rung.seconds / first, 3)",
        "round(first / rung.seconds, 3)",
    ),
    _LADDER(
        "the share is of the whole card where torch has less",
        "judge(forecast.device_bytes, forecast.capacity_bytes, share)",
        "judge(forecast.device_bytes, self.card.capacity_bytes, share)",
    ),
    _LADDER("the guide's other length is not called wrong", "if work.seq_len != asked.seq_len:", "if False:"),
    _in("analysis/verdict.py", "fitting/test_search_boundaries.py")(
        "what leaves no margin is safe",
        '"safe" if use_bytes <= (1 - margin) * capacity else',
        '"safe" if use_bytes <= capacity else',
    ),
    _FORECAST(
        "a bound is taken for more than it is",
        "less.peak.allocated_bytes - ROUNDING + less.peak.context_bytes <= most",
        "less.peak.allocated_bytes + less.peak.context_bytes < most // 2",
    ),
    _FORECAST("one micro-step is looked at", "MICRO_STEPS = 2\n", "MICRO_STEPS = 1\n"),
]

_CAUSE = _in("explaining/cause.py", "explaining/test_explain_boundaries.py", "explaining/test_explain_answers.py")
_MESSAGE = _in("explaining/message.py", "explaining/test_explain_tensors.py")
_FIXES = _in("explaining/fixes.py", "explaining/test_explain_boundaries.py", "explaining/test_explain_answers.py")
_TENSOR = _in("explaining/tensor.py", "explaining/test_explain_boundaries.py", "explaining/test_explain_tensors.py")
_PLACE = _in("explaining/place.py", "explaining/test_explain_boundaries.py", "explaining/test_explain_as_pasted.py")

EXPLAINING = [
    _CAUSE("a free piece of exactly the size is too small", "if hole >= asked:", "if hole > asked:"),
    _CAUSE("cached of exactly the size is too little", "if cached < asked:", "if cached <= asked:"),
    _CAUSE(
        "the tolerance of what was cached is dropped",
        "if cached + _tolerance(oom) < asked[0][0]:",
        "if cached < asked[0][0]:",
    ),
    _CAUSE(
        "expandable segments leave pieces",
        '        return Fragmentation("no", f"{pieces}; but expandable segments were on already")\n',
        "        pass\n",
    ),
    _CAUSE(
        "a rest below the tolerance adds up",
        "if self.rest_bytes >= -self.tolerance_bytes else",
        "if self.rest_bytes >= self.tolerance_bytes else",
    ),
    _CAUSE(
        "a process with 3 GiB beside torch is another one",
        "0 <= use.used.high - held <= MOST_OUTSIDE",
        "0 <= use.used.high - held < 0",
    ),
    _CAUSE("a process below what torch holds is this one", "0 <= use.used.high - held <=", "use.used.high - held <="),
    _CAUSE("two bare contexts are enough", "ALIKE, SEVERAL = 0.15, 3", "ALIKE, SEVERAL = 0.15, 2"),
    _CAUSE(
        "cached of old messages is not a difference",
        "return oom.reserved.middle - oom.allocated.middle",
        "return oom.reserved.middle",
    ),
    _MESSAGE(
        "a segment of 20 MiB stands for its own size",
        "return ((MiB + 1, 10 * MiB - 1), (18 * MiB + 1, LARGE_SEGMENT))",
        "return ((18 * MiB + 1, LARGE_SEGMENT),)",
    ),
    _CAUSE(
        "a request as large as the card is impossible",
        "case.requested.low <= whole or",
        "case.requested.low < whole or",
    ),
    _CAUSE("half a GiB of others is the cause", "held < max(case.short_bytes, SIGNIFICANT)", "held < case.short_bytes"),
    _CAUSE(
        "others that hold too little are the cause", "held < max(case.short_bytes, SIGNIFICANT)", "held < SIGNIFICANT"
    ),
    _CAUSE(
        "a card that was full is a limit",
        "        return None  # the card was full before the limit was reached\n",
        "        pass\n",
    ),
    _CAUSE(
        "private pools that are too small are the cause",
        "if pools is None or pools.low < case.short_bytes:",
        "if pools is None:",
    ),
    _CAUSE(
        "the rules come in another order",
        "_impossible, _beyond_the_limit, _limited, _mps, _free_unknown, _refused, _others,",
        "_others, _impossible, _beyond_the_limit, _limited, _mps, _free_unknown, _refused,",
    ),
    _CAUSE("a limit is short of nothing", "max(held + case.requested.middle - allowed.middle, 0)", "0"),
    _FIXES('"only x is in pieces" is the wrong way round', "if held > 4 * cached:", "if held < 4 * cached:"),
    _FIXES(
        "expandable segments are worth a try for less than was asked for",
        "not MiB < asked[0][1] <= cached:",
        "not MiB < asked[0][1]:",
    ),
    _FIXES(
        "expandable segments are proposed where they are on",
        "if not (told or case.clues.expandable or",
        "if not (told or",
        harmless="where they are on it is known already that memory is not in pieces",
    ),
    _TENSOR(
        "the phase's points are swapped",
        "points += RIGHT_PHASE if run.phase in pattern.phases else WRONG_PHASE",
        "points += WRONG_PHASE if run.phase in pattern.phases else RIGHT_PHASE",
    ),
    _TENSOR(
        "the line's points are swapped",
        "points += RIGHT_LINE if pattern.kind in run.hints else OTHER_LINE",
        "points += OTHER_LINE if pattern.kind in run.hints else RIGHT_LINE",
    ),
    _TENSOR(
        "a lead of one point less is enough", "points - rest[0].points >= AHEAD", "points - rest[0].points >= AHEAD - 1"
    ),
    _TENSOR(
        "a lead of one point more is needed", "points - rest[0].points >= AHEAD", "points - rest[0].points > AHEAD"
    ),
    _TENSOR(
        "16-bit readings of an fp32 job are as good",
        "points += WRONG_TYPE if run.precision",
        "points += 0 if run.precision",
    ),
    _TENSOR(
        "models without so many positions are able", "model.positions is None or model.positions >= length", "True"
    ),
    _PLACE(
        "a closure of the optimizer is the optimizer's step",
        'if sign.meaning == "optimizer step" and _has_a_pass',
        "if False and _has_a_pass",
    ),
    _PLACE(
        "the outermost line is shown",
        "shown=next((frame for frame in inner if not",
        "shown=next((frame for frame in frames if not",
    ),
]

_MACHINE = _in("checking/machine.py", "checking/test_check_bytes.py", "checking/test_check_machine.py")
_CHECK_MODEL = _in("checking/model.py", "checking/test_check_bytes.py")

CHECKING = [
    _MACHINE(
        "one checkpoint too few is on the disk", "config.saving.save_total_limit + 1", "config.saving.save_total_limit"
    ),
    _MACHINE(
        "host memory is that of one process of several", "loading_bytes(model) * processes", "loading_bytes(model)"
    ),
    _MACHINE(
        "offload counts for one process of several",
        "size * processes for what, size in host.items()",
        "size for what, size in host.items()",
    ),
    _MACHINE(
        "the optimizer's state counts for one process",
        "config.workload.optimizer)) * processes",
        "config.workload.optimizer))",
    ),
    _MACHINE("one batch a worker is prefetched", "PREFETCHED = 2", "PREFETCHED = 1"),
    _MACHINE("shared memory is that of one process", "needed = processes * workers *", "needed = workers *"),
    _MACHINE("a disk with just enough room is too small", "if count * each > unused:", "if count * each >= unused:"),
    _MACHINE(
        "the advised limit is one too high", "max(unused // max(each, 1) - 1, 0)", "max(unused // max(each, 1), 0)"
    ),
    _MACHINE("a card of the driver's own share is held", "gpu.used_bytes <= KEPT_BY_DRIVER", "gpu.used_bytes < 0"),
    _MACHINE("as many GPUs as processes are too few", "if len(gpus) < wanted:", "if len(gpus) <= wanted:"),
    _MACHINE(
        "an option of exactly this torch is too new",
        "if release_of(torch_version) < SINCE.get(name, (0,))",
        "if release_of(torch_version)[:2] <= SINCE.get(name, (0,))",
    ),
    _MACHINE(
        "the new variable is read one release later",
        "release_of(torch_version) < NEW_NAME_SINCE",
        "release_of(torch_version)[:2] <= NEW_NAME_SINCE",
    ),
    _MACHINE(
        "settings that cancel are fine",
        "if config.expandable_segments and config.max_split_size is not None:",
        "if False:",
    ),
    _MACHINE("a local part of a version counts", "Version(have).base_version", "have"),
    _MACHINE("what another extra needs counts", "counts and have is not None", "have is not None"),
    _CHECK_MODEL(
        "Adam keeps one moment",
        "return 2 * weight.numel() * weight.element_size()",
        "return weight.numel() * weight.element_size()",
    ),
    _CHECK_MODEL(
        "a checkpoint of LoRA has the whole model",
        'bytes_of(trained(model)) if work.kind == "lora" else loading_bytes(model)',
        "loading_bytes(model)",
    ),
    _CHECK_MODEL("a checkpoint has no optimizer state", " + state_bytes(model, str(work.optimizer))", ""),
    _CHECK_MODEL(
        "8-bit moments take as much as others",
        "return 2 * weight.numel()\n",
        "return 2 * weight.numel() * weight.element_size()\n",
    ),
]

_OFFLOAD = _in("jobs/training/offload.py", "jobs/training/test_offload_storages.py")
_CHUNKED = _in(
    "jobs/training/chunked_loss.py", "jobs/training/test_offload_storages.py", "jobs/training/test_chunked_loss.py"
)
_CHECKPOINTS = _in("jobs/training/checkpoints.py", "jobs/training/test_checkpoint_identity.py")
_QUANT = "jobs/training/test_quantised_training.py"
_KEYS, _KEYS_READ = _in("jobs/training/config.py", _QUANT), _in("jobs/training/config_file.py", _QUANT)
_NEEDS, _BITS = _in("jobs/training/refusals.py", _QUANT), _in("jobs/training/checkpoints.py", _QUANT)

TRAINING = [
    _OFFLOAD(
        "a storage changed in place is taken as kept",
        "found is not None and found.version == version else",
        "found is not None else",
    ),
    _OFFLOAD(
        "a storage of another tensor is taken as kept",
        "of is None or of() is None or kept is None",
        "of is None or kept is None",
        harmless="what is known of a storage goes with it",
    ),
    _OFFLOAD(
        "the neighbour is not fetched ahead",
        "        if before is not None:\n            self._come(before)\n",
        "",
    ),
    _OFFLOAD("what nobody needs is fetched", "while before is not None and before.uses <= 0:", "while False:"),
    _OFFLOAD(
        "a storage is let go before its copy is done",
        'does next."""\n        self.wait_for(kept)\n',
        'does next."""\n',
    ),
    _OFFLOAD("what was fetched stays on the device", "        if kept.uses <= 0:\n            self._drop(kept)\n", ""),
    _OFFLOAD("a view has another offset", "self.offset = tensor.storage_offset()", "self.offset = 0"),
    _OFFLOAD("the wrong neighbour's weights are fetched", "-1 if runs_again else 1", "1 if runs_again else -1"),
    _OFFLOAD(
        "the backward pass fetches forwards",
        "        self._backward_of = index\n        self._bring(index, -1)\n",
        "        self._backward_of = index\n        self._bring(index, 1)\n",
    ),
    _OFFLOAD("a block does not wait for its weights", "        self._lane.wait(self._arrived[index % PLACES])\n", ""),
    _OFFLOAD("three blocks have room on the device", "PLACES = 2", "PLACES = 3"),
    _OFFLOAD(
        "a weight that somebody wrote is not taken", "if self._seen != _state_of(parameter):", "if self._seen is None:"
    ),
    _OFFLOAD(
        "a schedule does not reach the host",
        "        self._give_settings()\n        arrived = None\n",
        "        arrived = None\n",
    ),
    _CHUNKED(
        "fp16 sums are not shrunk",
        "shrunk = min(1.0, FP16_TOKENS / max(1, len(labels))) if dtype == torch.float16 else 1.0",
        "shrunk = 1.0",
    ),
    _CHUNKED(
        "fp16 sums are shrunk and not grown again",
        "ctx.scales = 1 / parts, 1 / (parts * shrunk), 1 / (parts * shrunk)",
        "ctx.scales = 1 / parts, 1 / parts, 1 / parts",
    ),
    _CHUNKED(
        "ignored tokens count", "counted = (labels != ignored)[:, None]", "counted = (labels != ignored - 1)[:, None]"
    ),
    _CHUNKED("the softcap has no slope", "return made if slope is None else made.mul_(slope)", "return made"),
    _CHECKPOINTS("a changed shuffle is not told", '"seed", "shuffle", "max_seq_len")\n', '"seed", "max_seq_len")\n'),
    _CHECKPOINTS(
        "a changed seed is not told",
        '"global_batch_size", "seed", "shuffle", "max_seq_len")\n',
        '"global_batch_size", "shuffle", "max_seq_len")\n',
    ),
    _KEYS("kbit preparation is lost between config and job", '"quant.prepare": "kbit_prepare",', ""),
    _KEYS("gradients are clipped at a norm of 0", "schedule.max_grad_norm > 0", "schedule.max_grad_norm >= 0"),
    _KEYS_READ("4 and 8 bits at once are taken", "if len(asked) == 2:", "if len(asked) == 3:"),
    _KEYS_READ("8 bits are read as 4", '"int8" if asked[0] is not four', '"nf4" if asked[0] is not four'),
    _KEYS_READ("autocast over quantised weights is lost", '{"autocast": autocast, "precision":', '{"precision":'),
    _NEEDS("an old bitsandbytes is good enough", "release_of(found) < OLDEST", "release_of(found) > OLDEST"),
    _NEEDS("a card with bf16 is refused", "work.has_bf16 and not torch", "work.has_bf16 and torch"),
    _NEEDS("what gptq has quantised is trained", "not work.runs_in_memfit_train or work", "work"),
    _BITS("a checkpoint of other scales is continued", '{"double": work.double_quant, "compute"', '{"compute"'),
    _CHECKPOINTS(
        "a changed precision is not told",
        'for key in ("precision", "autocast", "data",',
        'for key in ("autocast", "data",',
    ),
    _CHECKPOINTS("a changed length is not told", '"shuffle", "max_seq_len")\n', '"shuffle")\n'),
    _CHECKPOINTS(
        "a changed global batch is not told",
        '"data", "global_batch_size", "seed", "shuffle", "max_seq_len")\n',
        '"data", "seed", "shuffle", "max_seq_len")\n',
    ),
    _CHECKPOINTS("another optimizer is continued", 'for key in ("method", "optimizer"):', 'for key in ("method",):'),
    _CHECKPOINTS(
        "a checkpoint is renamed before it is on the disk",
        '    for path in (*beside.rglob("*"), beside):\n'
        "        if path.is_file() or path.is_dir():\n            to_disk(path)\n",
        "",
    ),
    _CHECKPOINTS("a checkpoint's rename is not synced", "    to_disk(place.parent)\n", ""),
    _CHECKPOINTS(
        "to make room the last checkpoint goes too",
        "[: -max(1, count - 1)]",
        "[: len(find_checkpoints(output_dir)) - count + 1]",
    ),
    _CHECKPOINTS(
        "a deleted checkpoint looks whole", "    folder.rename(going)\n    return going\n", "    return folder\n"
    ),
]

_FILE = _in(
    "snapshots/file.py",
    "snapshots/test_snapshot_limits.py",
    "snapshots/test_snapshot_hostile.py",
    "snapshots/test_snapshot.py",
)

SNAPSHOTS = [
    _FILE("memo slots up to 2^28 are taken", 'rb"q.|r...\\0"', 'rb"q.|r...[\\0-\\x0f]"'),
    _FILE("a gzip is inflated without a limit", "stream.decompress(data, max_bytes + 1)", "stream.decompress(data)"),
    _FILE("a gzip of exactly the limit is refused", "if len(plain) > max_bytes:", "if len(plain) >= max_bytes:"),
    _FILE("a file of exactly the limit is refused", "if info.st_size > max_bytes:", "if info.st_size >= max_bytes:"),
    _FILE("a gzip that ends too early is read", "    if not stream.eof:\n", "    if False:\n"),
    _FILE("strings of any length are taken", "if size > MAX_STRING and at + 5 + size <= end:", "if False:"),
    _FILE("integers of any length are taken", '_sized(rb"\\x8a", range(10))', '_sized(rb"\\x8a", range(200))'),
    _FILE(
        "a file may unfold to anything",
        "for code, weight in weights.items()) > MAX_LOADED:",
        "for code, weight in weights.items()) < 0:",
    ),
]

_DIFF = _in("analysis/diff.py", "analysis/test_diff.py")
_RENDER_DIFF = _in("render/report.py", "analysis/test_diff.py")
_GROWTH = _in("recording/growth.py", "recording/test_growth_boundaries.py", "recording/test_growth.py")

ANALYSIS = [
    _DIFF(
        "the data phase is not merged with the next",
        "            begin = phase.begin if begin is None else begin\n        elif",
        "            pass\n        elif",
    ),
    _DIFF(
        "what was there before is not paired by block size",
        "    pairs = _paired_again(a, b, *found.pairs)\n",
        "    pairs = found.pairs\n",
    ),
    _DIFF("the sides are swapped", "enumerate(((a, b, -1), (b, a, 1)))", "enumerate(((a, b, 1), (b, a, -1)))"),
    _DIFF(
        "a partner freed exactly at the peak is held",
        "elif lives.death[partner] <= other.peak:",
        "elif lives.death[partner] < other.peak:",
    ),
    _DIFF(
        "a partner born exactly at the peak is not there",
        "if lives.birth[partner] > other.peak:",
        "if lives.birth[partner] >= other.peak:",
    ),
    _DIFF("a difference is a less b", "else b - a}", "else a - b}"),
    _DIFF(
        "a block's category goes to its partner unasked",
        "if categories[mine][own] == UNKNOWN and categories",
        "if categories",
    ),
    _DIFF(
        "the hint names the steps the wrong way round",
        '{"ab"[few]: steps[few][0], "ab"[1 - few]:',
        '{"ab"[1 - few]: steps[few][0], "ab"[few]:',
    ),
    _DIFF(
        "phases of b stand beside a",
        'for side, run in (("a", a), ("b", b)):\n        for phase',
        'for side, run in (("b", a), ("a", b)):\n        for phase',
    ),
    _RENDER_DIFF(
        "the signs on screen are swapped", '(("only_a", "-"), ("only_b", "+"))', '(("only_a", "+"), ("only_b", "-"))'
    ),
    _RENDER_DIFF(
        "more and less are swapped",
        'word = "more" if change > 0 else "less"',
        'word = "less" if change > 0 else "more"',
    ),
    _RENDER_DIFF("a plus is a minus", '("+" if count > 0 else "-")', '("-" if count > 0 else "+")'),
    _RENDER_DIFF(
        "who frees earlier is swapped",
        'other = "b" if lifetime["earlier"] == "a" else "a"',
        'other = lifetime["earlier"]',
    ),
    _GROWTH("the warm-up counts", "seen = _spread(samples[WARM_UP:])", "seen = _spread(samples)"),
    _GROWTH(
        "fragmentation is against this step's peak",
        "accumulate((each.peak_bytes or 0 for each in seen), max)",
        "[each.peak_bytes or 0 for each in seen]",
    ),
    _GROWTH(
        "a cache that has filled up is growth",
        "return slope if steady and _still(values) else None",
        "return slope if steady else None",
    ),
    _GROWTH("a verdict needs one sample more", "if len(seen) < FEWEST:", "if len(seen) <= FEWEST:"),
    _GROWTH("the end is reckoned from nothing", "capacity - highest,", "capacity,"),
    _GROWTH(
        "host growth comes before a leak",
        "        found\n        or _host_growth(seen, host_bytes)\n",
        "        _host_growth(seen, host_bytes)\n        or found\n",
    ),
    _GROWTH(
        "a peak that others read is lost",
        "        peak = max(self._read_elsewhere[0], counts.allocated_peak)\n",
        "        peak = counts.allocated_peak\n",
    ),
]

_ATTENTION = _in(
    "tracing/kernels/attention.py",
    "tracing/test_kernel_boundaries.py",
    "tracing/test_attention_choice.py",
    "tracing/test_ops_as_recorded.py",
)
_ROWS = _in(
    "tracing/kernels/rows.py",
    "tracing/test_kernel_boundaries.py",
    "tracing/test_reductions.py",
    "tracing/test_sorting.py",
)
_CONVOLUTIONS = _in("tracing/kernels/convolutions.py", "tracing/test_cudnn.py")
_PRODUCTS = _in("tracing/kernels/products.py", "tracing/test_kernel_boundaries.py", "tracing/test_ops_as_recorded.py")

TRACING = [
    _CONVOLUTIONS(
        "cuDNN tries its plans at every call",
        "if flags.benchmark and met not in tracer.tuned:",
        "if flags.benchmark:",
    ),
    _CONVOLUTIONS("the cache is kept when plans were tried", "        tracer.trace.empty_cache()\n", ""),
    _CONVOLUTIONS("a view lies as its block does", "begins & -begins or ALIGNED", "ALIGNED"),
    _CONVOLUTIONS(
        "what cuDNN says is not taken",
        "hold(plans[0], ",
        "hold(of.bytes_by_rule(kind, tracer.platform), ",
    ),
    _ATTENTION(
        "mem-efficient attention reads a gradient as it lies",
        "copied = 0 if grad.transpose(1, 2).is_contiguous() else grad.numel() * grad.element_size()",
        "copied = 0",
    ),
    _ATTENTION("flash splits to 95 % of the best fill", "fill[n] >= 0.85 * best", "fill[n] >= 0.95 * best"),
    _ATTENTION("flash splits a card that is 80 % full", "if work >= 0.8 * slots:", "if work >= 0.9 * slots:"),
    _ATTENTION(
        "flash has one slot a multiprocessor",
        "slots = b * h * row_blocks, sm_count * 2",
        "slots = b * h * row_blocks, sm_count",
    ),
    _ATTENTION(
        "flash cuts wide heads into long blocks",
        "256 if d <= 64 else 128 if d <= 128 else 64",
        "256 if d <= 64 else 128",
    ),
    _ATTENTION("cudnn splits 512 keys", "if keys <= 512 or", "if keys < 512 or"),
    _ATTENTION(
        "cudnn splits into parts of 64",
        "power_of_two_below((keys - 1) // 127)",
        "power_of_two_below((keys - 1) // 63)",
    ),
    _ATTENTION("flash with dropout splits", " if dropout == 0 else 1\n", "\n"),
    _ATTENTION(
        "grouped heads need no more in cudnn's backward",
        "    if h != k.shape[1]:\n        workspace",
        "    if False:\n        workspace",
    ),
    _ROWS(
        "a reduction ignores where its input begins", "for number in (offset, kept[0][0],", "for number in (kept[0][0],"
    ),
    _ROWS(
        "a reduction ignores the strides",
        "*(s for _, s in reduced), *(s for _, s in kept[1:])",
        "*(s for _, s in kept[1:])",
    ),
    _ROWS(
        "values of exactly 256 are not split",
        "if values < MAX_VALUES or grid > target:",
        "if values <= MAX_VALUES or grid > target:",
    ),
    _ROWS("semaphores are bytes", "semaphores=4 * grid)", "semaphores=grid)"),
    _ROWS(
        "a sort that one block does has buffers",
        "if count <= _items(SINGLE_TILE, key, value):",
        "if count < _items(SINGLE_TILE, key, value):",
    ),
    _ROWS(
        "a single tile is reduced in parts",
        "return 1 if count <= REDUCE_TILE else",
        "return 1 if count < REDUCE_TILE else",
    ),
    _PRODUCTS(
        "Blackwell has Hopper's workspace in every torch",
        "(major in (10, 12) and platform.torch >= (2, 12))",
        "major in (10, 12)",
    ),
    _PRODUCTS("a bias is fused with a single column", "right.shape[0] > 1 and columns > 1", "right.shape[0] > 1"),
    _PRODUCTS("a bias is fused with a single row", "right.shape[0] > 1 and columns > 1", "columns > 1"),
    _PRODUCTS("eight systems are solved at once", "at_once = _batch(out) > 8 or", "at_once = _batch(out) >= 8 or"),
]

_GATE = _in("checking/gate.py", "checking/test_gate.py")
_AGENTS = _in("serving/agents.py", "serving/test_agents.py")
_KEYS = _in("jobfiles/keys.py", "jobfiles/test_job_files.py")
_EDIT = _in("jobfiles/file.py", "jobfiles/test_job_files.py")
_AXOLOTL = _in("jobfiles/axolotl.py", "jobfiles/test_job_files.py")
_LAUNCHERS = _in("jobfiles/huggingface.py", "jobfiles/test_job_files.py")
_SECURITY = _in("serving/security.py", "serving/test_security.py")
_WORKERS = _in("serving/workers.py", "serving/test_workers.py")
_READERS = _in("serving/workers.py", "serving/test_viewer_answers.py")
_FOUND = _in("serving/viewer.py", "serving/test_viewer_answers.py", "serving/test_security.py")
_GENERATED = _in("tracing/compiled/generated.py", "tracing/test_torch_compile.py")
_AUTOTUNING = _in("tracing/compiled/autotuning.py", "tracing/test_torch_compile.py")
_PADDED = _in("planning/padded.py", "tracing/test_torch_compile.py")
_VERDICT = _in("analysis/verdict.py", "analysis/test_verdict.py")
_COMPILING = _in("tracing/compiled/hooks.py", "tracing/test_torch_compile.py")
_COMPILERS_SETTINGS = _in("tracing/compiled/settings.py", "tracing/test_torch_compile.py")
_STAGES = _in("tracing/compiled/stages.py", "tracing/test_torch_compile.py")
_REFUSED = _in("tracing/tracer.py", "tracing/test_torch_compile.py")
_QUANTISED = _in("jobs/quantised.py", "jobs/test_quantised.py", "planning/test_quantised_plans.py")
_LOADING = _in("jobs/loading.py", "jobs/test_quantised.py", "planning/test_quantised_plans.py")
_STATES = _in("jobs/training/optimizers.py", "jobs/test_quantised.py")

NEWER = [
    _PADDED("a mixture takes no copies", " + _copies(unpadded)[0]", ""),
    _PADDED("a product is padded while it is timed", "held[_allocated_by(timeline, OPERAND) == 0]", "held"),
    _PADDED("two kernels are timed at once", "timeline.allocated - kernels + buffer", "timeline.allocated + buffer"),
    _VERDICT("only what is allocated may be more", "int(max(allocated, max(", "int(max(allocated, -max("),
    _VERDICT("a card need not have what it may yet take", "context if ends is None else", "context if True else"),
    _PADDED("every padding is negligible", "_copies(trace)[1] * NEGLIGIBLE <", "NEGLIGIBLE <"),
    _GATE("a gate's limit is held against the bare peak", "self.needed_bytes > self.limit_bytes)", "False)"),
    _GATE(
        "growth of exactly the tolerance fails",
        "self.device_bytes > self.baseline_bytes * (1 + self.tolerance)",
        "self.device_bytes >= self.baseline_bytes * (1 + self.tolerance)",
    ),
    _GATE(
        "an update lifts a limit",
        '(*PASSED, "grew") if self.updated',
        '(*PASSED, "grew", "over limit") if self.updated',
    ),
    _GATE("two jobs may have one name", "        names.add(name)\n", ""),
    _GATE("a share of a job is not its own", 'if "tolerance" in job else usual', "if False else usual"),
    _GATE("a percent is a share of one", '/ (100 if text.endswith("%") else 1)', "/ 1"),
    _GATE("a gone job of the baseline is not told", "    if gone:\n", "    if False:\n"),
    _AGENTS("tools run a model's own code", "    refuse_code()\n", ""),
    _AGENTS("what is to be kept is forgotten", "keep=tuple(keep or ())", "keep=()"),
    _AGENTS(
        "what is printed goes into the protocol",
        "with _one_at_a_time, redirect_stdout(sys.stderr):",
        "with _one_at_a_time:",
    ),
    _AGENTS("a hint is not told to agents", "(error.message, error.hint) if part", "(error.message,) if part"),
    _AGENTS("a file's keys are never left out", "without=without or (), **given", "**given"),
    _KEYS(
        "a flag beside a refused key plans nothing",
        "if any(name in self.given for name in refused.instead):",
        "if False:",
    ),
    _KEYS("what is off is refused", "value is None or value in refused.harmless", "value is None"),
    _KEYS(
        "a section is not left out with its name",
        '[k for k in self._all if k == each or k.startswith(f"{each}.")]',
        "[k for k in self._all if k == each]",
    ),
    _KEYS("a half is a whole number", "number == int(number) and abs", "abs"),
    _EDIT(
        "a key that a file lacks is not written",
        "    return _added(text, above, path[-1], value)\n",
        "    return text\n",
    ),
    _EDIT(
        "what is there is written beside it",
        'return f"{text[:start]}{_yaml(value)}{rest}{text[end:]}"',
        'return f"{text[:start]}{_yaml(value)}{rest}{text[start:]}"',
    ),
    _AXOLOTL(
        "packed rows of Axolotl are as long as one",
        '"seq_len": rows * length, "grad_accum": steps',
        '"seq_len": length, "grad_accum": steps',
    ),
    _AXOLOTL(
        "Axolotl's rows are not rounded to 64",
        "-(-length // multiple) * multiple if multiple > 0",
        "length if multiple > 0",
    ),
    _AXOLOTL(
        "Axolotl's scales are not quantised again",
        '"quant": "nf4", "double_quant": True',
        '"quant": "nf4", "double_quant": False',
    ),
    _LAUNCHERS(
        "FSDP1 of accelerate is planned as FSDP2",
        'values["fsdp_config.fsdp_version"] != 2',
        'values["fsdp_config.fsdp_version"] > 2',
    ),
    _LAUNCHERS(
        "accelerate's checkpointing is not seen",
        '{"grad_checkpointing": True} if values',
        '{"grad_checkpointing": False} if values',
    ),
    _SECURITY("a path may lead out of the folder", "if found != root and root not in found.parents:", "if False:"),
    _SECURITY("another page may ask", 'if origin is not None and origin != f"http://{asked.host}":', "if False:"),
    _SECURITY("any name of a host is this machine", "if not is_this_machine(asked.host, self.host):", "if False:"),
    _SECURITY("a second Host counts", 'return "" if self.doubled else', "return"),
    _SECURITY("a body without a length is not counted", "        if read > most:\n", "        if False:\n"),
    _SECURITY("scripts read the cookie", "httponly=True, ", ""),
    _WORKERS("errors are kept", "if keep and answer.status == 200:", "if keep:"),
    _WORKERS("answers are kept without bound", "while self._kept_bytes > MOST_KEPT_BYTES:", "while False:"),
    _WORKERS("an older question is worked on all the same", "            self.waiting.remove(older)\n", ""),
    _WORKERS(
        "a question that others wait for is dropped",
        "if not older.asking and older in self.waiting:",
        "if older in self.waiting:",
    ),
    _READERS("files stay open without bound", "while len(self._open) >= MOST_OPEN:", "while False:"),
    _READERS("a dropped file stays on disk", "            if self._temporary:\n", "            if False:\n"),
    _FOUND("hidden files are listed", 'if entry.name.startswith("."):', "if False:"),
    _FOUND("links lead out of the folder", "if not inside(root, name).is_file():", "if not path.is_file():"),
    _FOUND("a folder has no end", "        if seen > MAX_ENTRIES:\n", "        if False:\n"),
    _GENERATED("a buffer that is used again is a new one", "            tracer.passed_on(old)\n", "            pass\n"),
    _GENERATED(
        "compiled calls are not marked",
        "            trace.facts.setdefault(COMPILED, []).append([began, len(trace)])\n",
        "            pass\n",
    ),
    _AUTOTUNING("kernels are timed at every launch", "        self._tuned.add(source)\n", ""),
    _AUTOTUNING("one configuration is timed", "if configurations < 2:", "if configurations < 1:"),
    _AUTOTUNING(
        "copies of what a kernel changes are not made",
        "if name in how.changed and isinstance",
        "if False and isinstance",
    ),
    _AUTOTUNING(
        "copies above the peak are made on the card", "            if size <= room:\n", "            if True:\n"
    ),
    _COMPILING(
        "another backend is planned",
        '        refuse(TraceError(f"memfit does not cover torch.compile with backend={backend!r}", hint=EAGERLY))\n',
        "        pass\n",
    ),
    _COMPILING(
        "bf16 on a card without it is an error",
        "error if isinstance(error, skip) else make(error, *args)",
        "make(error, *args)",
    ),
    _COMPILING(
        "a device of one's own is not guarded", '    if last in PRETENDED and "torch" not in name:\n', "    if False:\n"
    ),
    _COMPILERS_SETTINGS(
        "what a job sets in the compiler stays",
        "                setattr(module, each, was)\n",
        "                pass\n",
    ),
    _STAGES("a product with 0 is folded on the card", "on_host(folder.__init__)", "folder.__init__"),
    _REFUSED("a refusal may be passed over", "    if tracer.answers.refused is not None:\n", "    if False:\n"),
    _GENERATED("compiled buffers have no lines", "origin.module), origin.lines", "origin.module), ()"),
    _AUTOTUNING("timing is of no category", 'tracer.making("workspaces")', 'tracer.making("")'),
    _QUANTISED("scales have blocks of 128", "BLOCK, BLOCK_OF_SCALES = 64, 256", "BLOCK, BLOCK_OF_SCALES = 128, 256"),
    _QUANTISED(
        "what 8-bit loading brings again is as small as what is kept",
        "dtype=torch.float16, device=loaded.device)",
        "dtype=torch.int8, device=loaded.device)",
    ),
    _QUANTISED(
        "the input of an 8-bit layer is not kept",
        "ctx.kept = x if ctx.needs_input_grad[0] else None",
        "ctx.kept = None",
    ),
    _LOADING(
        "what transformers asks for at once is twice that",
        "for p, size in counted) // 8",
        "for p, size in counted) // 4",
    ),
    _LOADING("adapters stay in the type of the layer", 'work.adapter_dtype == "fp32" else ():', "False else ():"),
    _STATES(
        "states of few entries are of 8 bits too", "weight.numel() >= FEWEST_IN_8_BITS and id(weight)", "id(weight)"
    ),
    _STATES(
        "a paged state is on the device", "managed = self.paged and weight.numel() >= FEWEST_PAGED", "managed = False"
    ),
]

FAULTS: list[Fault] = [
    *PRUNING, *REPLAY, *PLANNING, *FITTING, *EXPLAINING, *CHECKING, *TRAINING, *SNAPSHOTS, *ANALYSIS, *TRACING, *NEWER,
]  # fmt: skip
