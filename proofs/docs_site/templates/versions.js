// Lists in a page's sidebar the same page of each version in `VERSIONS`, which the build writes
// before this; without scripts the sidebar has a link to the list of versions.
const root = new URL(".", document.currentScript.src).href;
const [current, ...rest] = location.href.replace(/[?#].*/, "").slice(root.length).split("/");
const page = rest.join("/") || "index.html";
for (const list of document.querySelectorAll(".versions ul")) {
  list.replaceChildren(
    ...Object.entries(VERSIONS).map(([version, pages]) => {
      const link = document.createElement("a");
      link.href = `${root}${version}/${pages.includes(page) ? page : "index.html"}`;
      link.textContent = version;
      if (version === current) link.setAttribute("aria-current", "page");
      const item = document.createElement("li");
      item.append(link);
      return item;
    }),
  );
}
