/* The views of the studio, in the order of the way between them. A view is { id, title, key, nav, scope, View }; see lib.js for what it uses. */
import runs from "./runs.js";
import inbox from "./inbox.js";
import start from "./start.js";
import chat from "./chat.js";
import schedules from "./schedules.js";
import foreign from "./foreign.js";
import reports from "./reports.js";
import agents from "./agents.js";

export const VIEWS = [runs, inbox, start, chat, agents, reports, schedules, foreign];
