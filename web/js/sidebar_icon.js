/** What stands on the tab's icon: how many builds go on, or that something can be mended. */
import { app } from "../../../scripts/app.js";
import { newestSnapshot, watchReports } from "./reports.js";

export const TAB = "warmgraph";

/** Our entry in the host's list of tabs, which is reactive: what changes on it, the page notices. */
export function ourTab() {
  return app.extensionManager?.getSidebarTabs?.().find(({ id }) => id === TAB);
}

function show() {
  const { warnings, building } = newestSnapshot();
  const left = building ? building.total - building.done : 0;
  const tab = ourTab();
  if (tab) tab.iconBadge = warnings?.length ? "!" : left > 0 ? String(left) : "";
}

app.registerExtension({
  name: "Warmgraph.Sidebar.Icon",
  setup() {
    watchReports((progress) => progress || show(), new AbortController().signal);
    show();
  },
});
