/**
 * Tell the server, with each prompt, which saved workflow it comes from.
 * The host's page never sends a file name. The entry goes into the copy that is sent, so the
 * workflow itself is neither changed nor marked as modified.
 */
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";

const ENTRY = "warmgraph";

/** @returns {{path: string, user?: string} | undefined} undefined for a tab that was never saved */
function savedWorkflow() {
  const workflow = app.extensionManager?.workflow?.activeWorkflow;
  if (!workflow?.path || workflow.isTemporary) return undefined;
  return { path: workflow.path, ...(api.user && { user: api.user }) };
}

app.registerExtension({
  name: "Warmgraph.Prompt.Workflow",
  setup() {
    const graphToPrompt = app.graphToPrompt.bind(app);
    app.graphToPrompt = async (...args) => {
      const saved = savedWorkflow();
      const result = await graphToPrompt(...args);
      if (result?.workflow) {
        const { [ENTRY]: _stale, ...extra } = result.workflow.extra ?? {};
        result.workflow.extra = saved ? { ...extra, [ENTRY]: saved } : extra;
      }
      return result;
    };
  },
});
