// Numbers in words, as the command line has them. Pure.

/** 0.4 ms, 84 ms, 2.41 s, 1 min 12 s, 5.2 h; a dash for what is not there. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "-";
  if (seconds === 0) return "0 ms";
  if (seconds < 0.00995) return `${(seconds * 1000).toFixed(1)} ms`;
  if (seconds < 0.9995) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(2)} s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

/** A time on an axis: 0, 250 ms, 10 s, 2.5 s, 3 min. */
export function tick(seconds) {
  if (seconds === 0) return "0";
  if (seconds < 1) return `${Number((seconds * 1000).toPrecision(3))} ms`;
  return seconds < 120 ? `${Number(seconds.toPrecision(3))} s` : `${Number((seconds / 60).toPrecision(3))} min`;
}

/** 12,345; from a hundred thousand on 123 k, 4.5 M. */
export function count(number) {
  if (number === null || number === undefined) return "-";
  if (number < 100000) return String(Math.round(number)).replace(/\B(?=(\d{3})+$)/g, ",");
  for (const [unit, size] of [
    ["k", 1e3],
    ["M", 1e6],
    ["B", 1e9],
    ["T", 1e12],
  ]) {
    const value = number / size;
    if (value < 999.5 || unit === "T") return `${value < 9.95 ? value.toFixed(1) : value.toFixed(0)} ${unit}`;
  }
  return String(number);
}

/** A rate: 0, 0.4, 12.3, 456. */
export function rate(number) {
  if (number === null || number === undefined) return "-";
  return number >= 100 || number === 0 ? count(number) : number.toFixed(1);
}

/** A share of one; "-" of nothing. */
export function percent(part, whole = 1) {
  if (!whole || part === null || part === undefined) return "-";
  const share = (part / whole) * 100;
  if (share === 100 || share === 0) return `${share} %`;
  if (share > 99.95) return "> 99.9 %";
  return share < 0.05 ? "< 0.1 %" : `${share.toFixed(1)} %`;
}

/** Three digits that say something. */
export function dollars(value) {
  if (value === null || value === undefined) return "-";
  if (value === 0) return "$0";
  if (value >= 1000) return `$${count(value)}`;
  if (value >= 1) return `$${value.toFixed(2)}`;
  return value >= 0.0001 ? `$${Number(value.toPrecision(3))}` : `$${value.toExponential(1)}`;
}

/** In the binary unit that leaves few digits. */
export function bytes(amount) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (amount < 1024) return unit === "B" ? `${Math.round(amount)} B` : `${amount.toFixed(1)} ${unit}`;
    amount /= 1024;
  }
  return `${amount.toFixed(1)} TiB`;
}

const two = (number) => String(number).padStart(2, "0");

/** The reader's own time of day, with the date where that is another than `now`'s. Seconds since 1970. */
export function moment(seconds, now = Date.now() / 1000) {
  const at = new Date(seconds * 1000);
  const today = new Date(now * 1000);
  const clock = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  const day = `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  return at.toDateString() === today.toDateString() ? clock : `${day} ${clock}`;
}

/** A name that is too long to be shown, with its middle left out. */
export function short(name, most = 22) {
  if (name.length <= most) return name;
  const end = Math.floor((most - 1) / 2);
  return `${name.slice(0, most - 1 - end)}…${name.slice(-end)}`;
}
