"""A record of what was learned of a model, in words and as the skeleton of a family's module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ATTENDS = {
    "live": "the host's own when it runs, with the step's options",
    "bare": "the host's own when it runs, without options",
    "traced": "the host's own as it was traced",
    "none": "none of the host's functions",
}


def words(record: dict[str, Any]) -> str:
    """Say what was learned of a model."""
    return "\n".join(_lines(record))


def _lines(record: dict[str, Any]) -> Iterator[str]:
    total = len(record["blocks"]) + len(record["outside"])
    count = len(record["ways"])
    learned = len(record["blocks"])
    yield f"{record['root']}: {learned} of {total} blocks are learned, in {count} ways"
    for key, way in record["ways"]:
        users = [(name, cls) for name, cls, ways in record["blocks"] if key in dict(ways)]
        classes = sorted({cls.rpartition(":")[2] for _, cls in users})
        yield f"way {key}: {', '.join(classes)} at {', '.join(name for name, _ in users)}"
        for label, lines in _facts(way):
            for number, line in enumerate(lines or ["nothing"]):
                yield f"    {label if number == 0 else '':10}{line}"
    for why in dict.fromkeys(why["text"] for _, why in record["outside"]):
        names = [name for name, each in record["outside"] if each["text"] == why]
        yield f"not learned: {', '.join(names)}: {why}"


def _facts(way: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    leaves = way["leaves"]
    yield "takes", [_leaf(leaf) for leaf in leaves if "value" not in leaf]
    fixed = [f"{name} {each}" for name, template in way["arguments"] for each in _plain(template)]
    yield "equal", fixed + [f"{leaf['in']} {leaf['value']}" for leaf in leaves if "value" in leaf]
    yield "gives", [leaves[at]["in"] if at >= 0 else "a tensor" for at in way["same"]]
    yield "writes", [leaves[at]["in"] for at in way["writes"]]
    reads = way["reads"]
    yield (
        "options",
        [
            *(f"{name} {value!r}" for name, value in reads["options"]),
            *(f"patches of other nodes: {name}" for name in reads["patches"]),
            *(f"all {name} of other nodes" for name in reads["whole"]),
        ],
    )
    yield "attention", [_ATTENDS[way["attends"]]]
    yield "sizes", [f"{name} {low} to {high}" for name, low, high, _ in way["symbols"]]


def _leaf(leaf: dict[str, Any]) -> str:
    """One argument: its name, sizes and dtype."""
    if leaf["dtype"] == "int":
        if "idle" in leaf:
            return f"{leaf['in']}, a number that counts for nothing"
        return f"{leaf['in']}, a number: {leaf.get('symbol', 'a size of another')}"
    sizes = ", ".join(map(str, leaf["dims"]))
    made = ""
    if "axis" in leaf:
        sign = " + " if leaf["how"] == "sum" else " x "
        made = f" ({leaf['dims'][leaf['axis']]} is {sign.join(map(str, leaf['of']))})"
    dtype = "" if leaf["dtype"] == "compute" else f" {leaf['dtype']}"
    return f"{leaf['in']} [{sizes}]{made}{dtype}"


def _plain(template: list[Any]) -> Iterator[str]:
    """The plain values in a template."""
    tag, *content = template
    if tag in ("plain", "dtype"):
        yield repr(content[0])
    elif tag in ("list", "tuple"):
        for each in content[0]:
            yield from _plain(each)
    elif tag in ("dict", "fields", "attributes"):
        for name, each in content[-1]:
            yield from (f"{name} {value}" for value in _plain(each))


def skeleton(record: dict[str, Any]) -> str:
    """Return the draft of a family's module, to be finished by hand."""
    home, _, root = record["root"].partition(":")
    name = home.split(".")[2] if home.count(".") > 1 else root.lower()
    lines = [
        f'"""The region plan of the host\'s {root}."""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import Any",
        "",
        "from ..contract import InputSpec, Symbol",
        "from ..plans.binding import TAKEN, Arguments",
        "from ..plans.family import Family",
        "from ..plans.plan import Form, Plan, host_forward",
        "from . import dit",
        "",
        f'NAME = "{name}"',
    ]
    lines += _symbols(record)
    forms: list[str] = []
    cuts: dict[tuple[str, str], list[str]] = {}
    for number, (key, way) in enumerate(record["ways"]):
        users = [(place, cls) for place, cls, ways in record["blocks"] if key in dict(ways)]
        cls = users[0][1].rpartition(":")[2]
        form = f"{cls}{number or ''}Form"
        forms.append(form)
        lines += ["", "", *_form(form, cls, way)]
        for stack in dict.fromkeys(place.rpartition(".")[0] for place, _ in users):
            cuts.setdefault((users[0][1], stack), []).append(form.lower())
    made = ", ".join(f"{form}()" for form in forms)
    lines += ["", "", f"FORMS: dict[str, Form] = {{form.name: form for form in [{made}]}}"]
    lines += ["", "", f"def plan_{name}(model: Any) -> Plan:"]
    lines += [f'    """Cut a {root} into regions."""', "    plan = Plan(symbols=SYMBOLS)"]
    for (cls, stack), (first, *others) in cuts.items():
        module, _, block = cls.partition(":")
        lines += [f"    from {module} import {block}", ""]
        lines += [f'    dit.cut_stack(plan, model, "{stack}", {block}, FORMS["{first}"])']
        lines += [f"    # Also called as {other} says: dispatch_several." for other in others]
    lines += ["    return plan", "", "", "FAMILY = Family("]
    lines += [f'    title="{root}",', f'    roots={{"{record["root"]}": plan_{name}}},']
    lines += ["    forms=FORMS,", "    unread=dit.UNREAD_OPTIONS,", ")", ""]
    return "\n".join(lines)


def _symbols(record: dict[str, Any]) -> list[str]:
    """All sizes of the ways, over the usual ones."""
    sizes = {
        size[0]: f"    Symbol({', '.join(map(repr, size))}),"
        for _, way in record["ways"]
        for size in way["symbols"]
    }
    return ["SYMBOLS = dit.SYMBOLS | {s.name: s for s in [", *sizes.values(), "]}"]


def _form(form: str, cls: str, way: dict[str, Any]) -> list[str]:
    leaves = way["leaves"]
    takes = ", ".join(f"`{_leaf(leaf)}`" for leaf in leaves if "value" not in leaf)
    gives = ", ".join(leaves[at]["in"] if at >= 0 else "a tensor" for at in way["same"])
    # What is taken of a call comes in the order of the inputs.
    order = [at for at, _ in way["order"]]
    named = {template[1]: name for name, template in way["arguments"] if template[0] == "leaf"}
    names = [named[at] for at in dict.fromkeys([*order, *named]) if at in named]
    inputs = [
        f"            InputSpec({leaf['in']!r}, {_dtype(leaf)}, {tuple(dims)!r}),"
        for leaf, dims in _inputs(way)
    ]
    taken = ", ".join(f"{name}=TAKEN" for name in names)
    passed = ", ".join(f"{name}={name}" for name in names)
    live = way["attends"] == "live"
    options = ", transformer_options=dit.options()" if live else ""
    return [
        f"class {form}({'dit.Attending' if live else 'Form'}):",
        f'    """{cls}: {takes} -> {gives}."""',
        "",
        "    family = NAME",
        f'    name = "{form.lower()}"',
        *([f"    writes = {tuple(range(len(way['writes'])))!r}"] if way["writes"] else []),
        f"    arguments = {'dit.takes' if live else 'Arguments'}({taken})",
        "",
        "    def label(self, module: Any) -> str:",
        f'        return "{cls}"',
        "",
        "    def inputs(self, module: Any, dtype: str) -> tuple[InputSpec, ...]:",
        "        return (",
        *inputs,
        "        )",
        "",
        "    def reference(self, module: Any, *inputs: Any) -> Any:",
        f"        {', '.join(names)}, *_ = inputs",
        f"        return host_forward(module, {passed}{options})",
    ]


def _dtype(leaf: dict[str, Any]) -> str:
    return "dtype" if leaf["dtype"] == "compute" else repr(leaf["dtype"])


def _inputs(way: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[Any]]]:
    for at, piece in way["order"]:
        leaf = way["leaves"][at]
        if leaf["dtype"] == "int":
            yield leaf, [leaf["symbol"]]
            continue
        dims = list(leaf["dims"])
        if leaf.get("how") == "sum":
            dims[leaf["axis"]] = leaf["of"][piece]
        elif leaf.get("how") == "product":
            dims[leaf["axis"] : leaf["axis"] + 1] = leaf["of"]
        yield leaf, dims
