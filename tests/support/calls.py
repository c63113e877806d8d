"""Driver calls that the emulated driver recorded."""


def names(calls):
    return [call.name for call in calls]


def advices(calls):
    return [call for call in calls if call.name == "cuMemAdvise"]


def range_queries(calls):
    return [call for call in calls if call.name.startswith("cuMemRangeGetAttribute")]
