'use strict';

// Heat maps, in the colours of this repository's other pictures: viridis, of which these are nine points.
const VIRIDIS = [[68, 1, 84], [71, 44, 122], [59, 81, 139], [44, 113, 142], [33, 144, 141], [39, 173, 129], [92, 200, 99],
  [170, 220, 50], [253, 231, 37]];

function colour(weight) {
  const at = Math.min(Math.max(weight, 0), 1) * (VIRIDIS.length - 1);
  const below = Math.min(Math.floor(at), VIRIDIS.length - 2);
  const mix = (c) => Math.round(VIRIDIS[below][c] + (at - below) * (VIRIDIS[below + 1][c] - VIRIDIS[below][c]));
  return `rgb(${mix(0)} ${mix(1)} ${mix(2)})`;
}

const FONT = '"DejaVu Sans", system-ui, sans-serif';
// Sides of a cell in pixels: whole numbers, so that no line shows between cells.
const CELL = { least: 3, most: 31, withNumbers: 24 };

// Draws the weights of one head, [names, names], as wide as its place is. `point` is called with the row and the column
// that the mouse is on, or with nothing.
function drawMap(canvas, names, weights, point) {
  const context = canvas.getContext('2d');
  // Slanted labels stand closer than their cells.
  const size = Math.max(7, Math.min(12, (0.6 * (canvas.clientWidth - 60)) / names.length));
  context.font = `${size}px ${FONT}`;
  const label = Math.ceil(Math.max(...names.map((name) => context.measureText(name).width)));
  const left = label + 8;
  const cell = Math.max(CELL.least, Math.min(CELL.most, Math.floor((canvas.clientWidth - left - 4) / names.length)));
  const below = Math.ceil(label * Math.SQRT1_2) + 16;
  const [width, height] = [canvas.clientWidth, cell * names.length + below];
  const density = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: width * density, height: height * density });
  canvas.style.height = `${height}px`;
  context.scale(density, density);
  names.forEach((_, i) => names.forEach((_, j) => {
    drawCell(context, left + j * cell, i * cell, cell, weights[i * names.length + j]);
  }));
  drawLabels(context, names, { left, cell, size });
  canvas.onmousemove = ({ offsetX, offsetY }) => {
    const [i, j] = [Math.floor(offsetY / cell), Math.floor((offsetX - left) / cell)];
    point(i >= 0 && i < names.length && j >= 0 && j < names.length ? [i, j] : undefined);
  };
  canvas.onmouseleave = () => point(undefined);
}

function drawCell(context, x, y, cell, weight) {
  context.fillStyle = colour(weight);
  context.fillRect(x, y, cell, cell);
  if (cell < CELL.withNumbers || weight < 0.005) return;
  context.font = `${Math.round(cell * 0.33)}px ${FONT}`;
  context.fillStyle = weight > 0.5 ? '#000' : '#fff';
  context.textAlign = 'center';
  context.textBaseline = 'middle';
  context.fillText(weight.toFixed(2).replace(/^0/, ''), x + cell / 2, y + cell / 2 + 0.5);
}

function drawLabels(context, names, { left, cell, size }) {
  context.font = `${size}px ${FONT}`;
  context.fillStyle = '#1b1b1f';
  context.textAlign = 'right';
  context.textBaseline = 'middle';
  names.forEach((name, i) => {
    context.fillText(name, left - 6, (i + 0.5) * cell);
    context.save();
    context.translate(left + (i + 0.5) * cell + 3, names.length * cell + 8);
    context.rotate(-Math.PI / 4);
    context.fillText(name, 0, 0);
    context.restore();
  });
}
