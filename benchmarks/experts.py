"""Experts that a router chooses: how often a group is loaded, beside other policies.

The groups of a WorkingSet are the experts of a model's layers; a token uses two in each layer.
Loads are counted, so that every driver gives the same numbers. The other policies are simulated
over the same uses, with as many groups on the device: "LRU" keeps the groups that were used last,
and "farthest next use" knows the future, so that its loads are the fewest that are possible.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import managedmem
from managedmem import WorkingSet

from .measure import MIB, Result, Row

LAYERS, EXPERTS, CHOSEN, TOKENS = 16, 16, 2, 400
GROUP_BYTES = 4096
SHARE = 4  # a quarter of the groups fit
NEED = 8 * MIB
DESCRIPTION = (
    f"Loads of 100 uses: {LAYERS} layers of {EXPERTS} experts, of which each of {TOKENS} tokens"
    f" uses {CHOSEN} in each layer, as groups of a WorkingSet with room for a quarter. Skewed"
    " routers choose an expert in proportion to 1 / its rank; one that drifts changes all ranks"
    " after 100 tokens. With dense layers, each layer has a group that every token uses."
)
ROUTERS = {"even": (0.0, False), "skewed": (1.0, False), "skewed, drifting": (1.0, True)}


def routed(exponent: float, drifts: bool, with_dense: bool) -> list[int]:
    """The numbers of the groups in the order of their uses."""
    chance = random.Random(1)
    weights = [1 / (rank + 1) ** exponent for rank in range(EXPERTS)]
    ranks = [chance.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
    uses = []
    for token in range(TOKENS):
        if drifts and token % 100 == 0:
            ranks = [chance.sample(range(EXPERTS), EXPERTS) for _ in range(LAYERS)]
        for layer in range(LAYERS):
            chosen: set[int] = set()
            while len(chosen) < CHOSEN:
                chosen.add(chance.choices(ranks[layer], weights)[0])
            if with_dense:
                uses.append(LAYERS * EXPERTS + layer)
            uses += [layer * EXPERTS + expert for expert in sorted(chosen)]
    return uses


def loads_of_set(uses: Sequence[int]) -> int:
    """The loads of a WorkingSet."""
    count = max(uses) + 1
    with WorkingSet(count // SHARE * GROUP_BYTES) as working:
        contents = managedmem.zeros(GROUP_BYTES)
        groups = [working.add(contents) for _ in range(count)]
        for number in uses:
            groups[number].use().close()
        return working.stats().loads


def loads_of_policy(uses: Sequence[int], ahead: bool) -> int:
    """The loads if the group leaves whose last use is the earliest or, with `ahead`, whose next use
    is the latest."""
    room = (max(uses) + 1) // SHARE
    following = [len(uses)] * len(uses)
    seen: dict[int, int] = {}
    for turn in range(len(uses) - 1, -1, -1):
        following[turn] = seen.get(uses[turn], 2 * len(uses))
        seen[uses[turn]] = turn
    present: dict[int, int] = {}
    loads = 0
    for turn, number in enumerate(uses):
        if number not in present:
            loads += 1
            if len(present) == room:
                del present[(max if ahead else min)(present, key=present.__getitem__)]
        present[number] = following[turn] if ahead else turn
    return loads


def measure() -> Iterator[Row]:
    """The rows of this group."""
    for with_dense in (False, True):
        for router, (exponent, drifts) in ROUTERS.items():
            uses = routed(exponent, drifts, with_dense)
            counts = {
                "ours": loads_of_set(uses),
                "LRU": loads_of_policy(uses, ahead=False),
                "farthest next use": loads_of_policy(uses, ahead=True),
            }
            title = f"{router} router{', with dense layers' if with_dense else ''}"
            results = {name: Result(100 * count / len(uses)) for name, count in counts.items()}
            yield Row(title, results, unit="loads")
