"""A stand-in for NVIDIA's package nvtx, and the ranges that a program has made with it.

Owns the order and the nesting of ranges in each thread. start() comes before the first import of
managedmem.
"""

import os
import sys
import threading
from types import ModuleType


class Attributes:
    def __init__(self, message):
        self.message = message


class Domain:
    """The fastest functions of nvtx.Domain, for which attributes are made in advance."""

    def __init__(self, name):
        self.name = name
        self.made = []  # the messages of attributes
        self.threads = {}  # for each its lines, and its open ranges

    def get_event_attributes(self, message=None, color=None, category=None, payload=None):
        self.made.append(message)
        return Attributes(message)

    def push_range(self, attributes):
        self.add("", attributes.message)
        self.of_thread()[1].append(attributes.message)

    def pop_range(self):
        self.of_thread()[1].pop()

    def mark(self, attributes):
        self.add("! ", attributes.message)

    def add(self, kind, text):
        lines, stack = self.of_thread()
        lines.append("  " * len(stack) + kind + text)

    def of_thread(self):
        return self.threads.setdefault(threading.get_ident(), ([], []))

    def lines(self):
        """What this thread has made since the last call; all ranges must have ended."""
        lines, stack = self.of_thread()
        assert not stack, stack
        found = [*lines]
        lines.clear()
        return found


def start(package="nvtx"):
    """Turn the ranges on, and return the domain that takes them."""
    domains = {}
    module = ModuleType(package)
    module.get_domain = lambda name: domains.setdefault(name, Domain(name))
    sys.modules[package] = module
    os.environ["MANAGEDMEM_NVTX"] = "1"
    return module.get_domain("managedmem")
