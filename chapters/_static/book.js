// Runs when the page is read and before its pictures begin to move.

// A picture that moves prints as the still that it takes the place of.
for (const root of document.querySelectorAll('[id^="minibatcher-"]')) {
  const paper = document.createElement("div");
  paper.className = "for-paper";
  paper.setAttribute("aria-hidden", "true");
  paper.append(...[...root.children].map(child => child.cloneNode(true)));
  root.after(paper);
}

// Paper is white: print in the light theme.
let shown = null;
addEventListener("beforeprint", () => {
  shown = document.documentElement.dataset.theme;
  document.documentElement.dataset.theme = "light";
});
addEventListener("afterprint", () => { document.documentElement.dataset.theme = shown; });

// A browser reads no other pages from a file's: search lists them without the lines around what was found.
if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
