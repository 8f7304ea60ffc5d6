// Draws the figures from their tables, copies them, and puts two runs side by side.
// Everything that this adds is built from text nodes: no value is ever parsed as HTML.
(() => {
  'use strict';
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, text, attributes = {}) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // Values of a figure.

  const columns = figure => all('thead th', figure).map(th => ({ ...th.dataset, label: th.textContent }));
  const cells = figure => all('tbody tr', figure).map(row => all('td', row).map(td => td.dataset.v ?? td.dataset.t ?? (td.textContent === '\u2013' ? '' : td.textContent)));
  const quote = text => /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  const csv = figure => figure.querySelector('pre.csv')?.textContent
    ?? [columns(figure).map(c => c.key), ...cells(figure)].map(row => row.map(quote).join(',')).join('\n') + '\n';
  const markdown = figure => {
    const shown = all('tbody tr', figure).map(row => all('td', row).map(td => td.textContent.replaceAll('|', '\\|')));
    const heads = columns(figure);
    const line = row => `| ${row.join(' | ')} |`;
    return [line(heads.map(c => c.label)), line(heads.map(c => c.kind === 'text' ? '---' : '---:')), ...shown.map(line)].join('\n') + '\n';
  };
  const parse = text => {
    const rows = [[]];
    for (const [, quoted, plain, end] of text.matchAll(/(?:"((?:[^"]|"")*)"|([^,\n]*))(,|\n|$)/g)) {
      rows.at(-1).push(quoted === undefined ? plain : quoted.replaceAll('""', '"'));
      if (end === '\n') rows.push([]);
      if (end === '') break;
    }
    return rows.filter(row => row.length > 1 || row[0]);
  };
  const typed = (value, kind) => value === '' ? null : kind === 'number' ? Number(value) : value;
  const data = figure => {
    const samples = figure.querySelector('pre.csv');
    if (samples) {
      const [keys, ...rows] = parse(samples.textContent);
      return rows.map(row => Object.fromEntries(keys.map((key, i) => [key, typed(row[i] ?? '', /_s$|^value$|^steps$/.test(key) ? 'number' : 'text')])));
    }
    const heads = columns(figure);
    return cells(figure).map(row => Object.fromEntries(heads.map((c, i) => [c.key, typed(row[i], c.kind)])));
  };

  // Charts.

  const theme = () => {
    const ink = color('--ink'), soft = color('--soft'), rule = color('--rule');
    const font = color('--sans');
    return {
      background: 'transparent', font,
      view: { stroke: null },
      axis: { labelColor: soft, titleColor: soft, gridColor: rule, domainColor: rule, tickColor: rule, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 'normal', labelFont: font, titleFont: font },
      axisX: { grid: false, labelOverlap: true }, axisY: { titleAnchor: 'end', titleAngle: 0, titleAlign: 'left', titleBaseline: 'bottom', titleX: 0, titleY: -6, domain: false, ticks: false, tickCount: 4, minExtent: 56, maxExtent: 56 },
      legend: { labelColor: ink, titleColor: soft, labelFontSize: 12, labelFont: font, symbolType: 'circle', labelLimit: 260 },
      range: { category: [0, 1, 2, 3, 4, 5, 6, 7].map(n => color(`--c${n}`)) },
      line: { color: color('--c0'), strokeWidth: 1.8 }, point: { color: color('--c0') }, bar: { color: color('--c0') }, rule: { color: color('--bad') }, text: { color: ink, font },
      padding: { left: 0, right: 8, top: 18, bottom: 4 },
    };
  };
  const fit = (spec, width) => {
    if (Array.isArray(spec)) return spec.map(one => fit(one, width));
    if (spec === null || typeof spec !== 'object') return spec;
    return Object.fromEntries(Object.entries(spec).map(([key, value]) => [key, key === 'width' && value === 'container' ? width : fit(value, width)]));
  };

  // A stretch of a figure over time: buttons choose it, and fingers that drag and pinch.
  const LEAST = 8, zooms = new Map();
  const zoomed = (figure, all) => {
    const zoom = { from: 0, size: all.length, rows: () => all.slice(zoom.from, zoom.from + zoom.size) };
    zooms.set(figure, zoom);
    const time = columns(figure)[0];
    if (time.kind !== 'time' || all.length <= LEAST) return zoom;
    all.forEach(row => { row[time.key] = new Date(row[time.key]); });
    const canvas = figure.querySelector('.canvas'), bar = make('div', undefined, { class: 'tools zoom' });
    const move = (from, size) => {
      zoom.size = Math.round(Math.min(Math.max(size, LEAST), all.length));
      zoom.from = Math.round(Math.min(Math.max(from, 0), all.length - zoom.size));
      const last = zoom.from + zoom.size === all.length;
      [zoom.size === LEAST, zoom.size === all.length, zoom.from === 0, last].forEach((at, i) => { bar.children[i].disabled = at; });
      zoom.show?.();
    };
    const part = (words, of) => {
      const made = make('button', words, { type: 'button' });
      made.addEventListener('click', () => move(...of(zoom.from, zoom.size)));
      return made;
    };
    const newest = (from, size, wanted) => from + size === all.length ? all.length - wanted : from + (size - wanted) / 2;
    bar.append(
      part('Zoom in', (from, size) => [newest(from, size, Math.max(size / 2, LEAST)), size / 2]), part('Zoom out', (from, size) => [newest(from, size, size * 2), size * 2]),
      part('Earlier', (from, size) => [from - size / 2, size]), part('Later', (from, size) => [from + size / 2, size]),
    );
    canvas.before(bar);
    move(0, all.length);
    const fingers = new Map();
    let began;
    const measure = () => {
      const [low, high] = [Math.min(...fingers.values()), Math.max(...fingers.values())];
      return { middle: (low + high) / 2 - canvas.getBoundingClientRect().left - 56, width: high - low, from: zoom.from, size: zoom.size };
    };
    canvas.addEventListener('pointerdown', event => { fingers.set(event.pointerId, event.clientX); began = measure(); });
    canvas.addEventListener('pointermove', event => {
      if (!fingers.has(event.pointerId)) return;
      fingers.set(event.pointerId, event.clientX);
      const now = measure(), wide = canvas.clientWidth - 72;
      const size = Math.max(fingers.size > 1 ? began.size * began.width / Math.max(now.width, 1) : began.size, LEAST);
      move(began.from + began.size * began.middle / wide - size * now.middle / wide, size);
    });
    const ended = event => { if (fingers.delete(event.pointerId) && fingers.size) began = measure(); };
    ['pointerup', 'pointercancel'].forEach(name => addEventListener(name, ended));
    return zoom;
  };
  const drawn = new Map();
  const draw = async figure => {
    const canvas = figure.querySelector('.canvas'), source = document.getElementById(figure.dataset.spec);
    const width = canvas.clientWidth;
    if (!source || !window.vegaEmbed || width < 60 || drawn.get(figure) === width) return;
    drawn.set(figure, width);
    const spec = fit(JSON.parse(source.textContent), width - 72);
    const zoom = zooms.get(figure) ?? zoomed(figure, data(figure));
    Object.assign(spec, {
      $schema: 'https://vega.github.io/schema/vega-lite/v6.json', data: { name: 'rows', values: zoom.rows() }, description: figure.getAttribute('aria-label'),
      params: ['accent', 'bad', 'warn', 'good', 'ink'].map(name => ({ name, value: color(name === 'accent' ? '--c0' : `--${name}`) })),
    });
    try {
      const { view } = await window.vegaEmbed(canvas, spec, { ast: true, renderer: 'svg', actions: false, config: theme(), tooltip: { theme: 'custom' } });
      zoom.show = () => view.data('rows', zoom.rows()).runAsync();
      figure.dataset.drawn = '';
    } catch (error) {
      canvas.textContent = `This chart cannot be drawn: ${error.message}. Its values are below.`;
    }
  };
  const nearby = new IntersectionObserver(entries => entries.filter(e => e.isIntersecting).forEach(e => draw(e.target)), { rootMargin: '600px' });
  const redraw = () => {
    drawn.clear();
    all('figure.chart[data-drawn]').forEach(figure => { nearby.unobserve(figure); nearby.observe(figure); });
  };
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
  let settled;
  addEventListener('resize', () => { clearTimeout(settled); settled = setTimeout(redraw, 150); });

  // Buttons.

  const copy = async text => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make('textarea', text);
      document.body.append(area);
      area.select();
      document.execCommand('copy');
      area.remove();
    }
  };
  const button = (words, text) => {
    const made = make('button', words, { type: 'button' });
    made.addEventListener('click', async () => {
      await copy(text());
      made.textContent = 'Copied';
      setTimeout(() => { made.textContent = words; }, 1500);
    });
    return made;
  };
  for (const figure of all('figure.chart')) {
    const tools = figure.querySelector('.tools');
    tools.append(button('Copy command', () => figure.querySelector('.command code').textContent), button('Copy CSV', () => csv(figure)), button('Copy markdown', () => markdown(figure)));
    nearby.observe(figure);
  }

  // Filters of tables and charts, and groups of rows.

  for (const bar of all('.filter')) {
    const items = all(bar.dataset.items), table = items[0].parentNode;
    const [input, select, told] = ['input', 'select', 'output'].map(name => bar.querySelector(name));
    let heads = [], texts;
    const show = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      texts ??= items.map(item => (item.querySelector('figcaption') ?? item).textContent.toLowerCase());
      const found = new Set(items.filter((_, i) => words.every(word => texts[i].includes(word))));
      items.forEach(item => { item.hidden = !found.has(item); });
      for (const { head, button, name, members } of heads) {
        const left = members.filter(item => found.has(item));
        head.hidden = !left.length;
        button.textContent = `${name} (${left.length})`;
        if (button.getAttribute('aria-expanded') === 'false') left.forEach(item => { item.hidden = true; });
      }
      told.textContent = words.length ? `${found.size} of ${items.length}` : '';
    };
    const group = () => {
      heads.forEach(({ head }) => head.remove());
      const names = select.value ? [...new Set(items.map(item => item.dataset[select.value]))] : [];
      heads = names.map(name => {
        const head = make('tbody', undefined, { class: 'group' }), row = make('tr'), button = make('button', name, { type: 'button', 'aria-expanded': 'true' });
        const cell = make('th', undefined, { scope: 'rowgroup', colspan: items[0].rows[0].cells.length });
        cell.append(button), row.append(cell), head.append(row);
        button.addEventListener('click', () => {
          button.setAttribute('aria-expanded', button.getAttribute('aria-expanded') === 'false');
          show();
        });
        return { head, button, name, members: items.filter(item => item.dataset[select.value] === name) };
      });
      table.append(...(heads.length ? heads.flatMap(({ head, members }) => [head, ...members]) : items));
      show();
    };
    bar.hidden = false;
    bar.addEventListener('submit', event => event.preventDefault());
    input.addEventListener('input', show);
    select?.addEventListener('change', group);
    if (select) group();
  }

  // Two runs side by side.

  const runs = all('article.run');
  const pick = document.querySelector('.pick');
  const facts = run => new Map([
    ...all('table.metrics tbody tr', run).map(row => [row.querySelector('th').textContent, { text: row.querySelector('td').textContent, value: Number(row.querySelector('td').dataset.v ?? NaN) }]),
    ...all('.facts > div', run).flatMap(group => all('dt', group).map(dt => [`${group.querySelector('h3').textContent}: ${dt.textContent}`, { text: dt.nextElementSibling.textContent, value: NaN }])),
  ]);
  const compare = () => {
    const [a, b] = all('select', pick).map(select => facts(document.getElementById(select.value)));
    const table = make('table'), head = make('tr'), body = make('tbody');
    for (const words of ['Metric or setting', 'A', 'B', 'B over A']) head.append(make('th', words, { scope: 'col' }));
    const rows = [...new Set([...a.keys(), ...b.keys()])].map(key => {
      const [x, y] = [a.get(key), b.get(key)];
      const row = make('tr');
      if (x?.text === y?.text) row.dataset.same = '';
      row.append(make('th', key, { scope: 'row' }), make('td', x?.text ?? '', { 'data-label': 'A' }), make('td', y?.text ?? '', { 'data-label': 'B' }), make('td', x?.value > 0 && y?.value > 0 ? (y.value / x.value).toFixed(3) : '', { 'data-label': 'B over A' }));
      return row;
    });
    body.append(...rows);
    const thead = make('thead');
    thead.append(head);
    table.append(thead, body);
    const card = make('div', undefined, { class: 'card table cards' });
    card.append(table);
    document.getElementById('side-by-side').replaceChildren(card);
  };
  if (pick && runs.length) {
    pick.hidden = false;
    all('select', pick).forEach((select, index) => {
      select.append(...runs.map(run => make('option', run.dataset.name, { value: run.id })));
      select.selectedIndex = Math.min(1 - index, runs.length - 1);
      select.addEventListener('change', compare);
    });
    compare();
    for (const link of all('a[data-a]')) {
      link.addEventListener('click', () => {
        all('select', pick).forEach((select, index) => { select.value = index ? link.dataset.b : link.dataset.a; });
        compare();
      });
    }
  }

  // Pages of one file.

  const pages = all('article.page');
  const mark = () => {
    if (pages.length < 2) return;
    const found = document.getElementById(decodeURIComponent(location.hash.slice(1)))?.closest('.page') ?? pages[0];
    const key = found.classList.contains('run') ? 'runs' : found.id;
    all('nav a').forEach(link => link.getAttribute('href') === `#${key}` ? link.setAttribute('aria-current', 'page') : link.removeAttribute('aria-current'));
  };
  addEventListener('hashchange', mark);
  mark();
})();
