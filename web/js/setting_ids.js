/** Settings of the page that other scripts ask for, by the ids that ComfyUI knows them by. */

/** Compiles every model. */
export const FOR_ALL = "Warmgraph.Speed.CompileAll";
/** Has *Make this workflow faster* compile VAEs and ControlNets, too. */
export const ALSO = "Warmgraph.Speed.MakeFasterAll";
