// What only makes the pages nicer: everything they do works without it.
"use strict";

(() => {
  // Parts of a page that go on by themselves: `data-live` seconds apart, and at once when `data-events` has news.
  const parts = [...document.querySelectorAll("[data-live][id]")];
  const LEAST = 1000;
  let loading = false, last = 0, planned = 0, source = null;
  const every = Math.min(...parts.map((part) => Number(part.dataset.live) || 30)) * 1000;
  const PATIENCE = 60000;
  let seen = Date.now(), leaving = false;
  let stale = null;  // the banner of a page that is not as the service has it

  const busy = () => {
    const at = document.activeElement;
    const typing = at && at.closest("[data-live]") && at.matches("input, select, textarea, button, summary");
    const asking = document.querySelector("[data-live] details.ask[open]");
    const marked = String(getSelection()) !== "";
    return document.hidden || typing || asking || marked;
  };

  const keepOpen = (from, to) => {
    const before = from.querySelectorAll("details"), after = to.querySelectorAll("details");
    if (before.length === after.length) before.forEach((one, i) => { after[i].open = one.open; });
  };

  const tail = (root) => root.querySelectorAll("[data-tail]").forEach((one) => { one.scrollTop = one.scrollHeight; });

  const address = () => {
    const found = new URL(location.href);
    for (const name of ["to", "at", "read"]) found.searchParams.delete(name);  // nothing is planned or read again
    return found;
  };

  const old = (why) => {
    if (!stale) {
      stale = document.createElement("p");
      stale.className = "stale notice notice-bad";
      stale.setAttribute("role", "alert");
      document.getElementById("main").prepend(stale);
    }
    const shown = document.querySelector("body > footer time");
    const text = `✗ Not current since ${shown ? shown.textContent : "it was loaded"}: ${why}.`;
    if (stale.textContent !== text) stale.textContent = text;
  };

  const fresher = () => {
    seen = Date.now();
    if (stale) stale.remove();
    stale = null;
  };

  const swap = async () => {
    planned = 0;
    if (loading) return;
    if (busy()) {
      if (!document.hidden && Date.now() - seen > every + PATIENCE) old("something on it is open, marked or in use");
      return;
    }
    loading = true;
    leaving = false;
    last = Date.now();
    try {
      let answer, text;
      try {
        answer = await fetch(address(), {
          headers: { Accept: "text/html" }, credentials: "same-origin", signal: AbortSignal.timeout(PATIENCE) });
        text = await answer.text();
      } catch {  // the page stays as it is, and asks again
        if (!leaving) old("the service cannot be reached");
        return;
      }
      if (answer.redirected && new URL(answer.url).pathname === "/login") { location.reload(); return; }
      if (!answer.ok) { old(`the service answers ${answer.status}`); return; }
      const fresh = new DOMParser().parseFromString(text, "text/html");
      for (const part of document.querySelectorAll("[data-live][id]")) {
        const next = fresh.getElementById(part.id);
        if (!next) continue;
        const focused = document.activeElement && document.activeElement.closest("[data-live]") === part
          ? document.activeElement.getAttribute("href") : null;
        keepOpen(part, next);
        const log = part.querySelector("[data-tail]");
        const atEnd = !log || log.scrollTop + log.clientHeight >= log.scrollHeight - 8;
        const place = log ? log.scrollTop : 0;
        part.replaceWith(next);
        const following = next.querySelector("[data-tail]");
        if (following) following.scrollTop = atEnd ? following.scrollHeight : place;
        if (focused) {
          const again = [...next.querySelectorAll("a[href]")].find((one) => one.getAttribute("href") === focused);
          if (again) again.focus({ preventScroll: true });
        }
        if (source && !next.dataset.events) { source.close(); source = null; }
      }
      const footer = fresh.querySelector("body > footer");
      if (footer) document.querySelector("body > footer").replaceWith(footer);
      fresher();
    } finally {
      loading = false;
    }
  };

  const soon = () => {
    if (!planned) planned = setTimeout(swap, Math.max(LEAST - (Date.now() - last), 50));
  };

  if (parts.length) {
    setInterval(() => { if (Date.now() - last >= every - 50 && document.querySelector("[data-live]")) swap(); }, every);
    window.addEventListener("beforeunload", () => { leaving = true; });  // which ends what is being loaded
    document.addEventListener("visibilitychange", () => { if (!document.hidden) soon(); });
    const speaking = parts.find((part) => part.dataset.events);
    if (speaking && window.EventSource) {
      source = new EventSource(speaking.dataset.events);
      source.addEventListener("job", soon);
      source.addEventListener("event", soon);
      window.addEventListener("pagehide", () => source && source.close());
    }
  }
  tail(document);

  const current = document.querySelector(".nav [aria-current]");
  if (current) current.scrollIntoView({ block: "nearest", inline: "nearest" });

  // The timeline: the pointer shows the moment that a click would choose.
  const drawing = document.querySelector("svg.timeline");
  if (drawing) {
    const begin = Date.parse(drawing.dataset.begin), end = Date.parse(drawing.dataset.end);
    const field = document.getElementById("at"), form = document.getElementById("choose");
    const text = (moment) => new Date(moment).toISOString().slice(0, 19);
    const momentAt = (event) => {
      const box = drawing.getBoundingClientRect();
      return begin + (end - begin) * Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
    };
    const label = document.createElement("p");
    label.className = "hover-time muted";
    label.setAttribute("aria-hidden", "true");
    drawing.parentElement.after(label);
    const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
    line.setAttribute("class", "hover-line");
    line.setAttribute("y1", "18");
    line.setAttribute("y2", drawing.getAttribute("height"));
    const over = (event) => event.target.closest(".slices, .lane, .bar");
    drawing.addEventListener("pointermove", (event) => {
      if (!over(event)) { line.remove(); label.textContent = ""; return; }
      const moment = momentAt(event), x = `${(moment - begin) / (end - begin) * 100}%`;
      line.setAttribute("x1", x);
      line.setAttribute("x2", x);
      drawing.insertBefore(line, drawing.querySelector(".slices"));
      label.textContent = `${text(moment).replace("T", " ")}Z`;
    });
    drawing.addEventListener("pointerleave", () => { line.remove(); label.textContent = ""; });
    drawing.addEventListener("click", (event) => {
      if (!over(event) || event.target.closest(".exact") || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      field.value = text(momentAt(event));
      form.requestSubmit();
    });
  }
})();
