"""What tests of the command that makes a workflow faster do in the page, and look at there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from warmgraph_tools.page import Page

MODEL, VAE, CONTROL_NET = (f"WarmgraphCompile{name}" for name in ("Model", "VAE", "ControlNet"))
STEP_CACHE = "WarmgraphStepCache"
MAKE, MAKE_ALL, REMOVE, ADD_STEP_CACHE = (
    f"Warmgraph.{name}" for name in ("MakeFaster", "MakeFasterVAE", "Remove", "AddStepCache")
)

#: In the page: the workflow as Undo has to bring it back. The host counts `order` anew with each
#: Undo, whatever was changed, newer ones list links in another order, and `ds` is what part of the
#: canvas is in view.
WORKFLOW = """((s) => { delete s.extra?.ds; return s; })(JSON.parse(JSON.stringify(
    app.rootGraph.serialize(), (key, value) => {
      if (key === 'order') return undefined;
      if (key !== 'links' || typeof value?.[0] !== 'object') return value;
      return [...value].sort((a, b) => (a.id ?? a[0]) - (b.id ?? b[0]));
    })))"""
GRAPHS = "[app.rootGraph, ...app.rootGraph.subgraphs.values()]"
OURS = f"{GRAPHS}.flatMap((g) => g.nodes).filter((n) => /^Warmgraph/.test(n.comfyClass))"


def settle(page: Page) -> None:
    """Wait until the workflow stays as it is: the host finds the types of nodes that take any, and
    sizes, some frames after it has loaded them.
    """
    page.wait_for(
        f"""(async () => {{
          const before = JSON.stringify({WORKFLOW});
          for (let n = 0; n < 5; n++) await new Promise((drawn) => requestAnimationFrame(drawn));
          return before === JSON.stringify({WORKFLOW});
        }})()"""
    )


def sent(page: Page) -> dict[str, Any]:
    return dict(page.run("return (await app.graphToPrompt()).output"))


def do(page: Page, command: str) -> None:
    page.run(f"await app.extensionManager.command.execute({command!r})")


def undo(page: Page, before: dict[str, Any], *, less: tuple[str, ...] = ()) -> None:
    """One Undo brings the workflow back, links and subgraphs included.

    Args:
        less: how the places end at which it may differ.
    """
    do(page, "Comfy.Undo")
    left = _differences(before, state(page))
    assert [text for text in left if not text.split(":")[0].endswith(less)] == []


def _differences(a: Any, b: Any, place: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from _differences(a.get(key), b.get(key), f"{place}.{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _differences(one, other, f"{place}.{number}")
    elif a != b:
        yield f"{place}: {a} -> {b}"


def state(page: Page) -> dict[str, Any]:
    settle(page)
    return dict(page.run(f"return {WORKFLOW}"))


def lies_on_nothing(page: Page) -> None:
    overlaps = page.run(
        f"""
        const box = ({{ pos: [x, y], size: [w, h], flags }}) =>
          flags?.collapsed ? [x, y - 30, 160, 30] : [x, y - 30, w, h + 30];
        return {OURS}.flatMap((node) => node.graph.nodes.filter((other) => {{
          const [a, b] = [box(node), box(other)];
          return other !== node && a[0] < b[0] + b[2] && b[0] < a[0] + a[2]
            && a[1] < b[1] + b[3] && b[1] < a[1] + a[3];
        }}).map((other) => `${{node.title}} lies on ${{other.title}}`));
        """
    )
    assert overlaps == []
