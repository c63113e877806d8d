"""The colours of pictures: the Okabe-Ito palette, which colour-blind people can distinguish.

Blue is the host, orange a device. A move between host and device has the colour of its destination,
dark if it was requested and light if it came by faults; evictions and the moves of numpy() have
colours of their own. Only the picture of causes has colours of causes.
"""

BLACK, DARK, GREY = "#000000", "#4d4d4d", "#8c8c8c"
LIGHT, PALE = "#cfcfcf", "#e4e4e4"
ORANGE, SKY, GREEN, YELLOW = "#e69f00", "#56b4e9", "#009e73", "#f0e442"
BLUE, VERMILION, PURPLE = "#0072b2", "#d55e00", "#cc79a7"

HOST, DEVICE, MIXED, UNKNOWN, COPIES = BLUE, ORANGE, DARK, LIGHT, SKY
"""Places of pages. MIXED is a cell of a picture with pages in several places."""
DEVICES = (ORANGE, PURPLE, VERMILION, YELLOW, GREEN)
"""The colours of the first devices in a picture of several devices."""

TO_DEVICE, TO_DEVICE_BY_FAULT = VERMILION, ORANGE
TO_HOST, TO_HOST_BY_FAULT = BLUE, SKY
EVICTED, BETWEEN_DEVICES, VIEWED = PURPLE, GREEN, DARK

CAUSES = {
    "requested": BLUE,
    "host_view": VIEWED,
    "fault": VERMILION,
    "speculative": YELLOW,
    "eviction": BLACK,
    "access_counters": SKY,
    "unknown": GREY,
}
