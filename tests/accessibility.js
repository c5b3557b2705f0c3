// Accessibility checks of a page: structure() and contrast() return problems, the others support the keyboard check.
({
  structure() {
    const found = [];
    const shown = (one) => one.checkVisibility({ visibilityProperty: true });
    const all = (selector) => [...document.querySelectorAll(selector)].filter(shown);
    if (!document.documentElement.lang) found.push("the page has no language");
    if (!document.title.trim()) found.push("the page has no title");
    if (/user-scalable=no|maximum-scale/.test(document.querySelector("meta[name=viewport]")?.content ?? "user-scalable=no"))
      found.push("the page cannot be enlarged");
    for (const tag of ["main", "body > header", "body > footer", "h1"])
      if (all(tag).length !== 1) found.push(`${all(tag).length} of ${tag}`);
    let before = 0;
    for (const heading of all("h1, h2, h3, h4, h5, h6")) {
      const level = Number(heading.tagName[1]);
      if (level > before + 1) found.push(`a heading of level ${level} follows ${before}: ${heading.textContent}`);
      if (!heading.textContent.trim()) found.push(`an empty heading of level ${level}`);
      before = level;
    }
    const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push(`two elements have the id ${id}`);
    for (const one of document.querySelectorAll("img:not([alt])")) found.push(`an image has no alt: ${one.src.slice(0, 40)}`);
    for (const one of document.querySelectorAll("th:not([scope])")) found.push(`a table heading has no scope: ${one.textContent}`);
    for (const one of document.querySelectorAll("[tabindex]")) if (one.tabIndex > 0) found.push(`tabindex ${one.tabIndex}`);
    for (const name of ["aria-labelledby", "aria-describedby", "for"])
      for (const one of document.querySelectorAll(`[${name}]`))
        for (const id of one.getAttribute(name).split(" "))
          if (!document.getElementById(id)) found.push(`${name} refers to a missing id: ${id}`);
    for (const one of document.querySelectorAll("[aria-hidden=true]"))
      if (one.matches("a, button, input, select") || one.querySelector("a, button, input, select, [tabindex]"))
        found.push("a control is hidden from screen readers");
    for (const one of all("button, select, input")) {
      const box = (one.closest("label") ?? one).getBoundingClientRect();
      if (box.width < 24 || box.height < 24) found.push(`${one.id || one.tagName} is smaller than 24 pixels`);
    }
    for (const one of all("body *"))
      if (one.scrollWidth > one.clientWidth + 1 && ["auto", "scroll"].includes(getComputedStyle(one).overflowX) &&
          one.tabIndex < 0 && !one.matches("select, pre")) found.push(`${one.className} cannot be scrolled with the keyboard`);
    return found;
  },

  contrast() {
    const found = new Set();
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = colour;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      return [r, g, b, a / 255];
    };
    const over = (top, under, alpha) => under.map((value, i) => (i === 3 ? 1 : top[i] * alpha + value * (1 - alpha)));
    const light = ([r, g, b]) => {
      const [x, y, z] = [r, g, b].map((v) => (v / 255 <= 0.03928 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
      return 0.2126 * x + 0.7152 * y + 0.0722 * z;
    };
    const behind = (element) => {
      const chain = [];
      for (let one = element; one; one = one.parentElement) chain.unshift(one);
      return chain.reduce((under, one) => {
        const colour = rgba(getComputedStyle(one).backgroundColor);
        return over(colour, under, colour[3]);
      }, matchMedia("(prefers-color-scheme: dark)").matches ? [0, 0, 0, 1] : [255, 255, 255, 1]);
    };
    const opacity = (element) => {
      let product = 1;
      for (let one = element; one; one = one.parentElement) product *= Number(getComputedStyle(one).opacity);
      return product;
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const element = walker.currentNode.parentElement;
      if (!walker.currentNode.data.trim() || element.closest("script, style, noscript, :disabled, .unseen, .skip")) continue;
      if (!element.checkVisibility({ visibilityProperty: true })) continue;
      const style = getComputedStyle(element);
      const colour = rgba(element.closest("svg") ? style.fill : style.color);
      const under = behind(element);
      const text = over(colour, under, colour[3] * opacity(element));
      const [high, low] = [light(text), light(under)].sort((a, b) => b - a);
      const size = parseFloat(style.fontSize);
      const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
      const ratio = (high + 0.05) / (low + 0.05);
      if (ratio < (large ? 3 : 4.5)) found.add(`${ratio.toFixed(2)} of contrast: ${walker.currentNode.data.trim().slice(0, 40)}`);
    }
    return [...found];
  },

  focusable() {
    const all = [...document.querySelectorAll("a[href], button, input, select, summary, [tabindex='0']")];
    return all.filter((one) => one.checkVisibility({ visibilityProperty: true }) && !one.disabled).length;
  },

  focus() {
    const one = document.activeElement;
    if (!one || one === document.body) return null;
    window.focused ??= [];
    window.focused.push(one);
    const style = getComputedStyle(one);
    const box = one.getBoundingClientRect();
    return {
      which: one.id || one.textContent.trim().slice(0, 30) || one.tagName,
      again: window.focused.indexOf(one) < window.focused.length - 1,
      visible: style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.width > 0,
    };
  },
})
