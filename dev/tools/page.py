"""The page of a server in a real Chromium, and what a user does there."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import templates
from .chromium import ANSWER_S, Chromium
from .host import Server

#: The workflow in front, and the texts on our nodes.
OPEN = "app.extensionManager.workflow.activeWorkflow"
STATUS = "[...document.querySelectorAll('.warmgraph-status')].map(e => e.innerText)"

#: Elements of the host's page, in older frontends and in newer ones.
TOAST = ":is(.p-toast-message, [data-testid=toast])"
TAB_BUTTON = ":is(.warmgraph-tab-button, [data-testid=warmgraph-tab-button])"
SIDE_PANEL = ".side-bar-panel"

#: The texts of all toasts that came since they were forgotten, those that have gone among them.
TOASTS = "window.toasted.map(({ text }) => text)"
NOTE_TOASTS = f"""
window.toasted = [];
const known = new WeakMap();
new MutationObserver(() => {{
  for (const toast of document.querySelectorAll({TOAST!r})) {{
    const {{ innerText }} = toast; // a button comes later, and on its way out it has none
    if (!known.has(toast)) {{
      known.set(toast, {{ text: '' }});
      window.toasted.push(known.get(toast));
    }}
    if (innerText) known.get(toast).text = innerText;
  }}
}}).observe(document, {{ childList: true, subtree: true, characterData: true }});
"""

HOST_NOISE = (  # what the page logs without this pack as well, for a user who has no files yet
    "/user.css",
    "/userdata?dir=",
    "/userdata/comfy.templates.json",
    "/userdata/workflows%2F.index.json",
    "ComfyApp graph accessed before initialization",
    "/assets/missingModel",  # asks the internet about models of the default workflow
    "Blocked attempt to show a 'beforeunload' confirmation",  # no user pressed anything
)


def expect_no_welcome(server: Server) -> None:
    """Keep what the host shows to newcomers, and what was open before, away from what is tried."""
    server.request("/settings/Comfy.TutorialCompleted", True)  # no welcome page over everything
    # Or a page that is loaded anew puts what was open before over what a test opens meanwhile.
    server.request("/settings/Comfy.Workflow.Persist", False)


class Page(Chromium):
    """A browser with one page, which shows a server's."""

    def __init__(self, program: str, profile: Path, server: Server) -> None:
        super().__init__(program, profile)
        self.server = server
        self.send("Page.addScriptToEvaluateOnNewDocument", source=f"{{{NOTE_TOASTS}}}")

    def open_server(self) -> None:
        """Load the server's page anew, and wait until a workflow can be opened, and run."""
        self.run("window.isLeft = true")
        self.open(self.server.url)
        self.wait_for("!window.isLeft && window.app?.vueAppReady && window.app?.isGraphReady")
        self.wait_for(f"!!{OPEN}")
        # What is queued before the server has given the page its name is told to nobody.
        self.wait_for("app.api.clientId && app.api.socket?.readyState === WebSocket.OPEN")

    @property
    def frontend(self) -> tuple[int, ...]:
        """The version of the host's page, as numbers."""
        version: str = self.run("return window.__COMFYUI_FRONTEND_VERSION__")
        return tuple(int(part) for part in version.split(".")[:2])

    def forget_toasts(self) -> None:
        """Close all toasts, and forget those that came."""
        self.run(
            "const all = app.extensionManager.toast; (all.dismissAll ?? all.removeAll).call(all)"
        )
        self.wait_for(f"!document.querySelector({TOAST!r})")
        self.run("window.toasted.length = 0")

    def toast(self, text: str) -> str:
        """Wait for a toast with this text, which may have gone again, and return all of its."""
        return str(self.wait_for(f"{TOASTS}.find((each) => each.includes({text!r}))"))

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Give the page another size in its own pixels; `scale` of a screenshot's make one."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def open_shipped(self, key: str) -> None:
        """Open a workflow as the Templates page does: from the host's own route."""
        name = templates.title(key)
        self.run(
            f"""
            const templates = await (await app.api.fetchApi('/workflow_templates')).json();
            const pack = Object.keys(templates).find((key) => templates[key].includes({name!r}));
            const url = `/api/workflow_templates/${{pack}}/{name}.json`;
            const workflow = await (await fetch(url)).json();
            await app.loadGraphData(workflow, true, true, {name!r}, {{ openSource: 'template' }});
            """
        )
        self.wait_for(f"{OPEN}?.filename.startsWith({name!r})")

    def save_as(self, name: str) -> None:
        """Save with the host's own command, typing the name into its dialog."""
        self.run("void app.extensionManager.command.execute('Comfy.SaveWorkflow')")
        self.wait_for("document.activeElement?.tagName === 'INPUT'")
        self.run("document.activeElement.select()")
        self.type_text(name)
        self.press("Enter")
        self.wait_for(f"{OPEN}.path === 'workflows/{name}.json' && !{OPEN}.isTemporary")

    def set_widget(self, kind: str, widget: str, value: Any) -> None:
        """Set a widget of the first node of a class."""
        self.run(
            f"""
            const node = app.rootGraph.nodes.find((n) => n.comfyClass === {kind!r});
            node.widgets.find((w) => w.name === {widget!r}).value = {json.dumps(value)};
            """
        )

    def set_setting(self, name: str, value: Any) -> None:
        """Change one of the page's settings."""
        self.run(f"await app.extensionManager.setting.set({name!r}, {json.dumps(value)})")

    def run_workflow(self) -> None:
        """Queue the open workflow as Run does, and wait until the server has finished it and the
        page has heard so.
        """
        before = len(self.server.get("/history"))
        self.run(
            """
            window.hasEnded = false;
            for (const end of ['execution_success', 'execution_error', 'execution_interrupted'])
              app.api.addEventListener(end, () => { window.hasEnded = true; }, { once: true });
            await app.queuePrompt(0, 1);
            """
        )
        self.wait_for(
            "window.hasEnded &&"
            f" Object.keys(await (await fetch('/history')).json()).length > {before}",
            seconds=600,
        )
        (*_, last) = self.server.get("/history").values()
        assert last["status"]["status_str"] == "success", last["status"]["messages"]

    def click(self, selector: str, *, seconds: float = ANSWER_S) -> None:
        """Press the mouse's button on the first such element, once it stands still and nothing lies
        over it.

        What moves the element meanwhile, a redrawing or a toast, has the press land elsewhere:
        then it is pressed again, as a user would.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            x, y = self.wait_for(
                f"""(async () => {{
                  const wanted = document.querySelector({selector!r});
                  if (!wanted || wanted.disabled) return null;
                  wanted.scrollIntoView({{ block: 'center' }});
                  const middle = () => {{
                    const box = wanted.getBoundingClientRect();
                    return [box.x + box.width / 2, box.y + box.height / 2];
                  }};
                  const before = middle();
                  for (let n = 0; n < 2; n++)
                    await new Promise((drawn) => requestAnimationFrame(drawn));
                  const place = middle();
                  if (`${{place}}` !== `${{before}}`) return null;
                  if (!wanted.contains(document.elementFromPoint(...place))) return null;
                  window.clickArrived = false;
                  addEventListener(
                    'click',
                    ({{ target }}) => window.clickArrived = !!target.closest({selector!r}),
                    {{ capture: true, once: true }},
                  );
                  return place;
                }})()"""
            )
            button = {"x": x, "y": y, "button": "left", "clickCount": 1}
            for kind in ("mousePressed", "mouseReleased"):
                self.send("Input.dispatchMouseEvent", type=kind, **button)
            # A click may have brought another page, which has no such variable.
            if self.run("return window.clickArrived ?? true"):
                return
        raise TimeoutError(f"no click arrived within {seconds:g} s at {selector}")

    def escape(self, selector: str, *, seconds: float = ANSWER_S) -> None:
        """Press Escape until there is no such element: one that still comes in may not hear it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.press("Escape")
            with suppress(TimeoutError):
                self.wait_for(f"!document.querySelector({selector!r})", seconds=5)
                return
        raise TimeoutError(f"Escape closed no {selector} within {seconds:g} s")

    def mouse(self, x: float, y: float, *, button: str = "left") -> None:
        """Press and let go a button of the mouse at a place of the window."""
        at = {"x": x, "y": y}
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **at)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, **at, button=button, clickCount=1)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag with the mouse's left button from one place of the window to another."""

        def send(kind: str, x: float, y: float, pressed: int) -> None:
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                buttons=pressed,
                clickCount=1,
            )

        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=start[0], y=start[1])
        send("mousePressed", *start, 1)
        for part in range(1, 11):
            x, y = (a + (b - a) * part / 10 for a, b in zip(start, end, strict=True))
            send("mouseMoved", x, y, 1)
        send("mouseReleased", *end, 0)

    def click_first(self, selector: str, condition: str) -> None:
        """Click the first such element `e` for which a JavaScript condition holds, once it is
        there.
        """
        found = f"[...document.querySelectorAll({selector!r})].find((e) => {condition})"
        self.wait_for(f"((e) => {{ e?.click(); return !!e; }})({found})")

    def own_errors(self) -> list[str]:
        """Return what the page logged as errors that the host alone does not."""
        return [text for text in self.errors if not any(noise in text for noise in HOST_NOISE)]
