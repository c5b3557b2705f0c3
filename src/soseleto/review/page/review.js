"use strict";
(() => {
  history.replaceState(null, "", "/"); // remove the one-time token from the address bar
  const at = (id) => document.getElementById(id);
  const whole = new Intl.NumberFormat("en");
  const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  let state = null; // from GET /state
  let place = 0; // index of the item shown; items.length is the end page
  let busy = false;

  const decided = (item) => state.decisions[item.id];
  const current = () => state.items[place];
  const percent = (share) => {
    if (share === null) return "–";
    if (share === 0 || share === 1) return `${100 * share} %`;
    return `${Math.min(99.9, Math.max(0.1, 100 * share)).toFixed(1)} %`; // 0 % and 100 % only where exact
  };

  const statusOf = (item) => {
    const decision = decided(item);
    if (!decision) return "none yet";
    if (state.audit) return { keep: "right", drop: "wrong", relabel: `wrong: ${decision.label}` }[decision.action];
    return { keep: "kept", drop: "dropped", relabel: `relabelled as ${decision.label}` }[decision.action];
  };

  const showCounts = () => {
    const decisions = state.items.map(decided).filter(Boolean);
    at("progress").max = state.items.length;
    at("progress").value = decisions.length;
    at("counts").textContent = `${whole.format(decisions.length)} of ${whole.format(state.items.length)}`;
  };

  const update = ({ decisions, audit }) => {
    state.decisions = Object.setPrototypeOf(decisions, null); // an id may be "constructor"
    state.audit = audit;
    if (!audit) return;
    at("sentence").textContent = audit.sentence;
    at("figures").replaceChildren(...audit.figures.map((figure) => {
      const element = document.createElement("div");
      const shown = document.createElement("dd");
      const value = cell("strong", figure.value === null ? "unknown" : percent(figure.value));
      const interval = ` between ${percent(figure.low)} and ${percent(figure.high)}`;
      shown.append(value, cell("span", interval));
      element.append(cell("dt", figure.name), shown);
      return element;
    }));
  };

  const cell = (tag, text, kind) => {
    const element = document.createElement(tag);
    element.textContent = text;
    if (kind) element.className = kind;
    if (tag === "th") element.scope = "row";
    return element;
  };

  const showFeatures = (item) => {
    at("features").hidden = !state.features.length;
    if (!state.features.length) return;
    const number = (value) => (value === null || value === undefined || value === "" ? "–"
      : typeof value === "string" ? value : short.format(value));
    at("features").querySelector("tbody").replaceChildren(...state.features.map((name, column) => {
      const row = document.createElement("tr");
      row.append(cell("th", name), cell("td", number(item.values[column]), "num here"));
      return row;
    }));
  };

  const showPicture = (item) => {
    const picture = at("picture");
    picture.hidden = !state.pictures;
    at("blank").hidden = true;
    if (!state.pictures) return;
    picture.alt = `Example ${item.id}`;
    picture.src = `/picture/${item.row}`;
    const next = state.items[place + 1];
    if (next) new Image().src = `/picture/${next.row}`;
  };

  const showLabels = (item) => {
    at("given").textContent = item.label;
    at("suggestion").hidden = item.suggested === null;
    at("suggested").textContent = item.suggested ?? "";
    if (!state.audit) at("relabel").disabled = item.suggested === null;
    document.querySelectorAll(".label-given").forEach((one) => { one.textContent = item.label; });
    document.querySelectorAll(".label-suggested").forEach((one) => { one.textContent = item.suggested ?? ""; });
    at("label").value = decided(item)?.label ?? item.suggested ?? item.label;
  };

  const show = () => {
    showCounts();
    const over = place >= state.items.length;
    at("example").hidden = over;
    at("done").hidden = !over;
    if (over) {
      at("done").focus();
      return;
    }
    const item = current();
    at("which").textContent = `${state.audit ? "Example" : "Suspect"} ${whole.format(place + 1)} of ${whole.format(state.items.length)}`;
    at("id").textContent = item.id;
    at("wrong").textContent = percent(item.wrong);
    at("weight").textContent = item.weight?.toFixed(2) ?? "–";
    at("decision").textContent = statusOf(item);
    at("decision").dataset.action = decided(item)?.action ?? "";
    at("previous").disabled = place === 0;
    showLabels(item);
    showPicture(item);
    showFeatures(item);
  };

  const undecidedAfter = (from) => {
    const count = state.items.length;
    for (let step = 0; step < count; step += 1) {
      const index = (from + step) % count;
      if (!decided(state.items[index])) return index;
    }
    return count;
  };

  const post = async (path, body) => {
    const answer = await fetch(path, {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };

  const reload = async () => {
    update(await (await fetch("/state")).json());
    show();
  };

  const exclusively = async (work) => {
    if (busy || !state) return; // ignore keys pressed before the next example is shown
    busy = true;
    try {
      await work();
      at("trouble").textContent = "";
    } catch (error) {
      at("trouble").textContent = error instanceof TypeError
        ? "The server has stopped, and this decision was not saved. Start the command again: all earlier decisions are kept."
        : `This decision was not saved. ${error.message}`;
      if (!(error instanceof TypeError)) await reload().catch(() => {}); // what another page has decided
    } finally {
      busy = false;
    }
  };

  const decide = (action, label = null) => exclusively(async () => {
    const item = current();
    if (!item || (action === "relabel" && !label)) return;
    if (action === "relabel" && label === item.label) action = "keep";
    const request = { row: item.row, action, before: decided(item) ?? null };
    update(await post("/decide", action === "relabel" ? { ...request, label } : request));
    at("announcement").textContent = `${item.id}: ${statusOf(item)}.`;
    place = undecidedAfter(place + 1);
    show();
  });

  const undo = () => exclusively(async () => {
    const answer = await post("/undo", {});
    update(answer);
    const index = state.items.findIndex((item) => item.id === answer.id);
    if (index >= 0) place = index;
    at("announcement").textContent = answer.id === null ? "Nothing to undo." : `${answer.id}: decision undone.`;
    show();
  });

  const move = (step) => {
    if (busy || !state) return;
    place = Math.min(Math.max(place + step, 0), state.items.length);
    show();
  };

  const relabelOther = () => {
    decide("relabel", at("label").value);
    if (document.activeElement === at("label")) at("actions").focus();
  };

  const keys = {
    k: () => decide("keep"),
    [at("relabel") ? "d" : "w"]: () => decide("drop"),
    ...(at("relabel") ? { s: () => decide("relabel", current()?.suggested) } : {}),
    l: () => at("label").focus(),
    u: undo,
    arrowleft: () => move(-1),
    arrowright: () => move(1),
  };

  document.addEventListener("keydown", (event) => {
    const key = event.key.toLowerCase();
    if (event.target === at("label")) {
      if (key === "enter") { event.preventDefault(); relabelOther(); }
      if (key === "escape") at("actions").focus();
      return; // letters select a label in the list
    }
    if ((event.ctrlKey || event.metaKey) && key === "z") { event.preventDefault(); undo(); return; }
    if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || !at("keys").checked) return;
    if (!Object.hasOwn(keys, key)) return;
    event.preventDefault();
    keys[key]();
  });

  at("picture").addEventListener("error", () => { at("picture").hidden = true; at("blank").hidden = false; });
  at("keep").addEventListener("click", keys.k);
  at("drop").addEventListener("click", () => decide("drop"));
  at("relabel")?.addEventListener("click", keys.s);
  at("other").addEventListener("click", relabelOther);
  at("previous").addEventListener("click", keys.arrowleft);
  at("next").addEventListener("click", keys.arrowright);
  at("undo").addEventListener("click", undo);
  at("undo-last").addEventListener("click", undo);
  at("again").addEventListener("click", () => { place = 0; show(); });

  fetch("/state").then((answer) => answer.json()).then((loaded) => {
    state = loaded;
    update(loaded);
    at("label").append(...state.classes.map((name) => new Option(name, name)));
    if (state.items.every((item) => item.wrong === null)) document.querySelectorAll(".facts div")[0].hidden = true;
    if (state.basis) document.querySelectorAll(".facts dt")[0].textContent = `P(mislabelled), ${state.basis}`;
    place = undecidedAfter(0);
    show();
  }).catch(() => {
    at("trouble").textContent = "The server has stopped. Start the command again: all decisions are kept.";
  });
})();
