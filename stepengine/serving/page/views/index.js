/* The views of the studio, in the order of the way between them. A view is { id, title, key, nav, View }; see lib.js for what it uses. */
import runs from "./runs.js";
import start from "./start.js";
import inbox from "./inbox.js";

export const VIEWS = [runs, inbox, start];
