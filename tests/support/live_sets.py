"""The tests that accessed_by and peer_accessible_by share: a live set, held against a real one.

A test class inherits one of these. Its file has the fixtures `assign`, which sets the property;
`start`, the members at first; `pair`, the live set and a model of it, both with those members;
`universe`, all locations that can be members; and `others`, sets to compare and combine with.
"""

import collections.abc
import copy
import itertools
import random

import pytest

from outcomes import outcome


class Tagged(set):
    pass


class FrozenTagged(frozenset):
    pass


SETS = [set, frozenset, Tagged, FrozenTagged]
ITERABLES = [set, list, tuple, iter, dict.fromkeys]
COMPARISONS = ["__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"]
OPERATORS = ["and", "or", "sub", "xor"]
NEW_SETS = ["union", "intersection", "difference", "symmetric_difference"]
IN_PLACE = ["update", *(f"{name}_update" for name in NEW_SETS[1:])]


def subsets(universe):
    """Sets of members: nothing, each member, the first and the last, all."""
    return [set(), *({member} for member in universe), {*universe[:1], *universe[-1:]}, {*universe}]


class IsASet:
    def test_is_registered_as_a_mutable_set(self, pair):
        assert isinstance(pair[0], collections.abc.MutableSet)
        assert issubclass(type(pair[0]), collections.abc.MutableSet)

    def test_has_every_method_of_set_and_of_the_abc(self, pair):
        for cls in (set, collections.abc.MutableSet):
            wanted = {name for name in dir(cls) if not name.startswith("_")}
            wanted.discard("test_c_api")  # of a Python built with Py_DEBUG
            assert wanted <= set(dir(pair[0]))

    def test_cannot_be_hashed_or_made_by_hand(self, pair):
        with pytest.raises(TypeError, match="unhashable"):
            hash(pair[0])
        with pytest.raises(TypeError):
            type(pair[0])()


class Reading:
    def test_length_truth_and_members(self, pair, universe):
        proxy, model = pair
        assert len(proxy) == len(model)
        assert bool(proxy) == bool(model)
        assert sorted(proxy, key=repr) == sorted(model, key=repr)
        for member in universe:
            assert (member in proxy) == (member in model)

    @pytest.mark.parametrize("name", COMPARISONS)
    def test_compares_like_a_set(self, pair, others, name):
        proxy, model = pair
        for other, kind in itertools.product(others, SETS):
            assert getattr(proxy, name)(kind(other)) is getattr(model, name)(kind(other)), other

    def test_compares_from_the_right_too(self, pair, others):
        proxy, model = pair
        for other in others:
            assert (other == proxy) is (other == model)
            assert (other < proxy) is (other < model)
            assert (other >= proxy) is (other >= model)

    @pytest.mark.parametrize("copier", [lambda s: s.copy(), copy.copy, copy.deepcopy])
    def test_copies_are_plain_sets(self, pair, copier):
        """The live set belongs to its owner, so a copy has only its members."""
        proxy, model = pair
        copied = copier(proxy)
        assert type(copied) is set
        assert copied == model
        copied.add("something")
        assert set(proxy) == model

    @pytest.mark.parametrize("name", ["issubset", "issuperset", "isdisjoint"])
    @pytest.mark.parametrize("kind", ITERABLES)
    def test_relations_take_any_iterable(self, pair, others, name, kind):
        proxy, model = pair
        for other in others:
            assert getattr(proxy, name)(kind(other)) is getattr(model, name)(kind(other))

    @pytest.mark.parametrize("name", NEW_SETS)
    @pytest.mark.parametrize("kind", ITERABLES)
    def test_new_sets_by_name(self, pair, others, name, kind):
        proxy, model = pair
        for other in others:
            result = getattr(proxy, name)(kind(other))
            assert type(result) is set
            assert result == getattr(model, name)(kind(other))
        assert proxy == model

    @pytest.mark.parametrize("name", NEW_SETS[:3])
    def test_new_sets_of_none_or_many(self, pair, others, name):
        proxy, model = pair
        assert getattr(proxy, name)() == getattr(model, name)() == model
        assert getattr(proxy, name)(*others) == getattr(model, name)(*others)

    @pytest.mark.parametrize("name", [*OPERATORS, *(f"r{name}" for name in OPERATORS)])
    def test_operators_give_plain_sets(self, pair, others, name):
        proxy, model = pair
        for other, kind in itertools.product(others, SETS):
            result = getattr(proxy, f"__{name}__")(kind(other))
            wanted = getattr(model, f"__{name}__")(kind(other))
            assert result == wanted
            assert type(result) is type(wanted), "as the left operand, as with sets"

    @pytest.mark.parametrize("name", OPERATORS)
    def test_operators_refuse_others(self, pair, universe, name):
        assert getattr(pair[0], f"__{name}__")([*universe]) is NotImplemented
        assert getattr(pair[0], f"__i{name}__")([*universe]) is NotImplemented


class Writing:
    @pytest.mark.parametrize("name", ["add", "discard", "remove"])
    def test_one_member(self, pair, universe, name):
        proxy, model = pair
        for member in universe:
            assert outcome(getattr(proxy, name), member) == outcome(getattr(model, name), member)
            assert set(proxy) == model

    def test_pop_takes_members_until_it_is_empty(self, pair):
        proxy, model = pair
        assert {proxy.pop() for _ in range(len(model))} == model
        assert set(proxy) == set()
        with pytest.raises(KeyError):
            proxy.pop()

    def test_clear(self, pair):
        assert pair[0].clear() is None
        assert set(pair[0]) == set()

    @pytest.mark.parametrize("name", IN_PLACE)
    @pytest.mark.parametrize("kind", ITERABLES)
    def test_in_place_by_name(self, pair, assign, start, universe, name, kind):
        for other in subsets(universe):
            assign(start)
            model = set(start)
            assert getattr(pair[0], name)(kind(other)) is None
            getattr(model, name)(kind(other))
            assert set(pair[0]) == model

    @pytest.mark.parametrize("name", IN_PLACE[:3])
    def test_in_place_of_none_or_many(self, pair, universe, name):
        proxy, model = pair
        getattr(proxy, name)()
        assert set(proxy) == model
        many = [{*universe[:1]}, [*universe[-1:]], set(universe)]
        getattr(proxy, name)(*many)
        getattr(model, name)(*many)
        assert set(proxy) == model

    @pytest.mark.parametrize("name", OPERATORS)
    def test_in_place_operators_give_the_live_set(self, pair, assign, start, universe, name):
        proxy, _ = pair
        for other in [*subsets(universe), proxy]:
            assign(start)
            model = set(start)
            assert getattr(proxy, f"__i{name}__")(other) is proxy
            getattr(model, f"__i{name}__")(set(start) if other is proxy else other)
            assert set(proxy) == model

    @pytest.mark.parametrize("kind", [*ITERABLES, frozenset])
    def test_assignment_takes_any_iterable(self, pair, assign, universe, kind):
        for value in subsets(universe):
            assign(kind(value))
            assert set(pair[0]) == value

    @pytest.mark.parametrize("seed", range(4))
    def test_random_operations_agree_with_a_model(self, pair, assign, universe, seed):
        """200 operations, each with one or several members."""
        rng = random.Random(seed)
        proxy, model = pair
        bulk = [*IN_PLACE, *(f"__i{name}__" for name in OPERATORS), "assign"]
        single = ["add", "discard", "remove"] if universe else []
        for step in range(200):
            name = rng.choice([*bulk, *single, "pop", "clear"])
            chosen = {*rng.sample(universe, rng.randrange(len(universe) + 1))}
            if name == "pop":
                value = outcome(proxy.pop)
                assert value is KeyError if not model else value in model
                model.discard(value)
            elif name == "assign":
                assign(chosen)
                model = chosen
            else:
                one = name in single
                arguments = () if name == "clear" else (rng.choice(universe) if one else chosen,)
                wanted = outcome(getattr(model, name), *arguments)
                found = outcome(getattr(proxy, name), *arguments)
                assert (found is proxy) if wanted is model else (found == wanted), (step, name)
            assert set(proxy) == model, (step, name)
            assert len(proxy) == len(model)
