"""What tests of the tab in the sidebar do in the page, and look at there."""

from __future__ import annotations

from warmgraph_tools.page import TAB_BUTTON, Page

TAB = ".warmgraph-tab"
REPORT = "(await (await fetch('/warmgraph/report')).json())"
BAR = ".warmgraph-status [role=progressbar]"
RUNNING = "(await (await fetch('/queue')).json()).queue_running.length > 0"
#: Finds texts of ours that stand out less than 4.5 to 1 from what lies behind them.
FAINT = """
const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const read = (colours) => {
  for (const colour of ['black', ...colours]) {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
  }
  return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
};
const light = (colours) => {
  const [r, g, b] = read(colours).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const behind = (element) => {
  const found = [];
  for (let e = element; e; e = e.parentElement)
    found.unshift(getComputedStyle(e).backgroundColor);
  return found;
};
const faint = [];
for (const place of document.querySelectorAll('.warmgraph-tab, .warmgraph-status')) {
  const walker = document.createTreeWalker(place, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || e.disabled || !e.checkVisibility()) continue;
    const back = behind(e);
    const colour = getComputedStyle(e).color;
    const [a, b] = [light(back), light([...back, colour])];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faint.push([walker.currentNode.data, ratio, colour, ...back]);
  }
}
return faint;
"""


def wait_until_idle(page: Page) -> None:
    page.wait_for(f"!({RUNNING})")


def open_tab(page: Page) -> None:
    if not page.run(f"return !!document.querySelector('{TAB}')"):
        page.click(TAB_BUTTON)
    page.wait_for(f"!!document.querySelector('{TAB}')")


def open_small(page: Page) -> None:
    """Open the first template and make its images small."""
    page.open_shipped("text_to_image")
    page.set_widget("KSampler", "steps", 4)  # fewer say nothing of a step's time
    for side in ("width", "height"):
        page.set_widget("EmptyLatentImage", side, 128)


def text_in(page: Page, selector: str) -> str:
    return str(page.run(f"return document.querySelector({selector!r})?.innerText ?? ''"))
