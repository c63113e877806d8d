"""Driver calls that the emulated driver recorded."""

from managedmem import emulator


def recorded(act):
    """The calls that the driver gets while `act` runs."""
    with emulator.recording() as calls:
        act()
    return calls


def names(calls):
    return [call.name for call in calls]


def advices(calls):
    return [call for call in calls if call.name == "cuMemAdvise"]


def range_queries(calls):
    return [call for call in calls if call.name.startswith("cuMemRangeGetAttribute")]
