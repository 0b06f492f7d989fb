"""Few of many cases, in which each pair of values occurs: what a test runs instead of all, which is marked thorough."""

import collections
import itertools


def cover(cases):
    """Return some of ``cases``, tuples of values: each two values that one of them has are those of a returned one.

    Of equally good cases one with values that are rare so far.
    """
    values = [tuple(enumerate(map(str, case))) for case in cases]
    pairs = [set(itertools.combinations(each, 2)) for each in values]
    left, chosen, used = set().union(*pairs), [], collections.Counter()

    def gained(number):
        return len(pairs[number] & left), -sum(used[value] for value in values[number])

    while left:
        best = max(range(len(cases)), key=gained)
        chosen.append(cases[best])
        used.update(values[best])
        left -= pairs[best]
    return chosen
