"""Few of many cases, in which each pair of values occurs: what a test runs instead of all, which is marked thorough.

``cover`` chooses among given cases, and ``pairwise`` among all combinations, of which it makes fewer.
"""

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


def pairwise(factors):
    """Few rows, dicts of a value for each factor, in which every pair of values of two factors occurs."""
    names = list(factors)
    open_pairs = {(a, x, b, y) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}

    def gained(row, name, value):
        pairs = (
            (a, row[a], name, value) if names.index(a) < names.index(name) else (name, value, a, row[a]) for a in row
        )
        return sum(pair in open_pairs for pair in pairs)

    def place(pair):
        return [(names.index(pair[i]), factors[pair[i]].index(pair[i + 1])) for i in (0, 2)]

    rows = []
    while open_pairs:
        a, x, b, y = min(open_pairs, key=place)
        row = {a: x, b: y}
        for name in names:
            if name not in row:
                values = factors[name]
                first = len(rows) % len(values)  # of equally good ones another each time
                row[name] = max(values[first:] + values[:first], key=lambda value, n=name, r=row: gained(r, n, value))
        open_pairs -= {(a, row[a], b, row[b]) for a, b in itertools.combinations(names, 2)}
        rows.append({name: row[name] for name in names})
    return rows
