// What scrolls must be reached by the keyboard, too.
"use strict";
const makeScrollable = () => {
  for (const box of document.querySelectorAll("pre, .output, .table-wrapper, .toc-scroll, .sidebar-scroll")) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight) box.tabIndex = 0;
  }
};
addEventListener("load", makeScrollable);
addEventListener("resize", makeScrollable);
