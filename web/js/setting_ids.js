/** Settings of the page that other scripts ask for, by the ids that ComfyUI knows them by. */

/** Compiles every model. */
export const FOR_ALL = "Warmgraph.Speed.CompileAll";
