"use strict";
(() => {
  const choice = document.getElementById("class");
  if (!choice) return;
  const classes = document.querySelectorAll(".class");
  const show = () => classes.forEach((one, index) => {
    one.hidden = choice.value !== "all" && Number(choice.value) !== index;
  });
  choice.addEventListener("change", show);
  document.querySelector(".choose").hidden = false;
  show();
})();
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const slider = document.getElementById("threshold");
  const integer = new Intl.NumberFormat("en");
  const percent = (part, whole) => {
    if (!whole) return "";
    const value = (100 * part) / whole;
    if (value === 0 || value === 100) return `${value} %`;
    return `${Math.min(99.9, Math.max(0.1, value)).toFixed(1)} %`;
  };
  const set = (id, text) => {
    const place = document.getElementById(id);
    if (place) place.textContent = text;
  };

  const showCounts = (at) => {
    const total = data.kept[0];
    set("kept", integer.format(data.kept[at]));
    set("kept-share", `${percent(data.kept[at], total)} of ${integer.format(total)}`);
    set("effective", integer.format(Math.round(data.effective[at])));
    if (!data.wrong) return;
    const wrong = data.wrong[0];
    const lost = total - data.kept[at] - (wrong - data.wrong[at]);
    set("wrong", integer.format(data.wrong[at]));
    set("wrong-share", `${percent(data.wrong[at], wrong)} of ${integer.format(wrong)}`);
    set("lost", integer.format(lost));
    set("lost-share", `${percent(lost, total - wrong)} of ${integer.format(total - wrong)}`);
  };

  const showLabels = (at) => {
    document.querySelectorAll("#labels tbody tr").forEach((row, index) => {
      const kept = data.labels[index][at];
      const count = Number(row.dataset.count);
      row.querySelector(".fill").setAttribute("width", ((100 * kept) / count).toFixed(1));
      row.querySelector(".percent").textContent = percent(kept, count);
    });
  };

  const moveRules = (at) => {
    document.querySelectorAll(".rule.threshold").forEach((rule) => {
      const from = Number(rule.dataset.from);
      const x = from + ((Number(rule.dataset.to) - from) * at) / 100;
      rule.setAttribute("x1", x);
      rule.setAttribute("x2", x);
    });
  };

  const show = () => {
    const at = Number(slider.value);
    const text = (at / 100).toFixed(2);
    set("at", text);
    slider.setAttribute("aria-valuetext", text);
    document.querySelectorAll(".at").forEach((place) => { place.textContent = text; });
    showCounts(at);
    showLabels(at);
    moveRules(at);
  };

  slider.addEventListener("input", show);
  document.querySelector(".slider").hidden = false;
  show();
})();
