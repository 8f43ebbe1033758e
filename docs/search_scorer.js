/* How the search of the site ranks what it found; Sphinx puts this into its own script (html_search_scorer).

   Whoever searches types words of a task. As Sphinx ranks, a page of the specification that has one of the words in some heading stands
   beside the guide that is about them, and a class of that name stands before it. Here the guide comes first, then the reference, then
   the pages that say the same for who comes from elsewhere, and the specification last. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score, , kind]) => {
    const found = { title: 10, object: -10 }[kind] ?? 0; // all of the words in one heading; the name of a class or function
    const folder = { spec: -12, "coming-from": -6, reference: -3 }[page.split("/")[0]] ?? 0;
    return score + found + folder;
  },
};
