// Keeps the page as the server sees the lab: it sends HTML of what changed, by the id of its element.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const age = (seconds) => {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]])
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
    return `${Math.max(0, Math.floor(seconds))} s`;
  };
  const showAges = (within) => {
    for (const time of within.querySelectorAll("time[data-at]")) {
      const at = Number(time.dataset.at);
      const words = `${age(Date.now() / 1000 - at)} ago`;
      if (time.textContent !== words) time.textContent = words;
      if (!time.dateTime) {
        time.dateTime = new Date(at * 1000).toISOString();
        time.title = new Date(at * 1000).toLocaleString();
      }
    }
  };
  const waiting = new Map();
  const inUse = (element) => element.contains(document.activeElement) && document.activeElement.matches("input");
  const put = (id, html) => {
    const element = byId(id);
    if (!element) return;
    if (inUse(element)) return void waiting.set(id, html); // nobody's typing is lost
    waiting.delete(id);
    element.outerHTML = html;
    showAges(byId(id));
  };
  document.addEventListener("focusout", () => setTimeout(() => {
    for (const [id, html] of [...waiting]) put(id, html);
  }));
  const events = new EventSource(`events?view=${document.body.dataset.view}`);
  events.onopen = () => { byId("lost").hidden = true; };
  events.onerror = () => { byId("lost").hidden = false; };
  events.onmessage = (event) => {
    const news = JSON.parse(event.data);
    if ("rows" in news) {
      byId("devices").innerHTML = news.rows;
      showAges(byId("devices"));
    }
    for (const [id, html] of Object.entries(news.html)) put(id, html);
  };
  document.addEventListener("submit", async (event) => {
    const form = event.target;
    if (!form.matches(".act")) return;
    event.preventDefault();
    if (form.dataset.ask && !confirm(form.dataset.ask)) return;
    const answer = byId("answer");
    try {
      const response = await fetch(form.action, { method: "POST", body: new URLSearchParams(new FormData(form)) });
      answer.textContent = await response.text();
      if (response.ok) form.reset();
      document.activeElement.blur();
    } catch (error) {
      answer.textContent = String(error);
    }
    answer.hidden = false;
  });
  showAges(document);
  setInterval(() => showAges(document), 1000);
})();
