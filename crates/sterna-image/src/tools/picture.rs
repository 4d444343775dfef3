//! Draws RAM as a picture: each block is a strip of cells. A darker cell has more pages with data.
//!
//! A block runs like text: from left to right, then to the next row. Adjacent cells of one shade are one rectangle.
//! Therefore the picture stays small for any amount of RAM. Each rectangle shows its range as a tooltip.

use std::fmt::Write;

use super::coverage::{BlockCoverage, Coverage};
use super::inspect::{BlockPart, Inspection};

/// Cells in a row.
const COLUMNS: u64 = 128;
/// Rows that all blocks share in proportion to their size. Each block has at least one row.
const ROWS: u64 = 56;
const CELL: f64 = 6.0;
const ROW: f64 = 11.0;
const LEFT: f64 = 216.0;
const TOP: f64 = 62.0;
const GAP: f64 = 10.0;
const WIDTH: f64 = LEFT + COLUMNS as f64 * CELL + 24.0;

/// Class and legend of each shade: from no data to only data, then absent pages.
const SHADES: [(&str, &str); 7] = [
    ("z", "all zero"),
    ("a", "up to 25 % data"),
    ("b", "up to 50 %"),
    ("c", "up to 75 %"),
    ("d", "below 100 %"),
    ("e", "all data"),
    ("n", "not in the image"),
];

const STYLE: &str = "\
<style>
svg{font:12px system-ui,sans-serif;background:#fff}
text{fill:#24292f}.h{font-size:15px;font-weight:600}.s{fill:#57606a;font-size:11px}.r{text-anchor:end}
.z{fill:#e9edf1}.a{fill:#c6dbef}.b{fill:#93c4de}.c{fill:#5ba3cf}.d{fill:#2f7ebc}.e{fill:#08458b}
.n{fill:url(#hatch)}.l{stroke:#b6bec6;stroke-width:1.5}
@media (prefers-color-scheme:dark){svg{background:#0d1117}text{fill:#e6edf3}.s{fill:#9198a1}
.z{fill:#21262d}.a{fill:#123a5e}.b{fill:#1a5b92}.c{fill:#2f7ebc}.d{fill:#6cb0e0}.e{fill:#c9e4f8}.l{stroke:#545d68}}
</style>
<defs><pattern id=\"hatch\" width=\"5\" height=\"5\" patternUnits=\"userSpaceOnUse\" \
patternTransform=\"rotate(45)\"><line class=\"l\" x1=\"0\" y1=\"0\" x2=\"0\" y2=\"5\"/></pattern></defs>
";

/// Returns the picture as SVG.
pub fn picture(inspection: &Inspection, coverage: &Coverage) -> String {
    let total: u64 = coverage.blocks.iter().map(|block| block.pages).sum();
    let rows: Vec<u64> = coverage.blocks.iter().map(|block| rows(block.pages, total)).collect();
    let height = TOP + rows.iter().map(|rows| *rows as f64 * ROW + GAP).sum::<f64>() + 48.0;
    let mut svg = String::new();
    let label = format!("Memory of {}", inspection.file);
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"{}\">",
        escape(&label)
    );
    svg += STYLE;
    head(&mut svg, inspection, coverage, total);
    let mut top = TOP;
    for ((part, block), rows) in inspection.blocks.iter().zip(&coverage.blocks).zip(rows) {
        strip(&mut svg, part, block, rows, top);
        top += rows as f64 * ROW + GAP;
    }
    legend(&mut svg, top + 14.0);
    svg += "</svg>\n";
    svg
}

/// Number of rows of a block: its share of all rows, at least one.
fn rows(pages: u64, total: u64) -> u64 {
    let share = u128::from(pages) * u128::from(ROWS) / u128::from(total.max(1));
    (share as u64).min(pages.div_ceil(COLUMNS)).max(1)
}

fn head(svg: &mut String, inspection: &Inspection, coverage: &Coverage, total: u64) {
    let name = inspection.file.rsplit('/').next().unwrap_or(&inspection.file);
    text(svg, "h", 16.0, 26.0, name);
    let data: u64 = coverage.blocks.iter().map(BlockCoverage::data_pages).sum();
    let share = data as f64 * 100.0 / total.max(1) as f64;
    let machine = match inspection.machine_type.as_str() {
        "" => String::new(),
        machine => format!("{machine}, "),
    };
    let line = format!(
        "{}, {machine}{} of RAM, {} with data ({share:.1} %)",
        inspection.kind,
        size(inspection.ram_bytes),
        size(data << sterna_wire::PAGE_SHIFT)
    );
    text(svg, "s", 16.0, 45.0, &line);
}

fn strip(svg: &mut String, part: &BlockPart, block: &BlockCoverage, rows: u64, top: f64) {
    text(svg, "", 16.0, top + ROW - 1.5, &shorten(&part.name, 26));
    if rows > 1 {
        let data = size(part.data_pages << sterna_wire::PAGE_SHIFT);
        text(svg, "s", 16.0, top + 2.0 * ROW + 2.0, &format!("{}, {data} data", size(part.length_bytes)));
    } else {
        text(svg, "s r", LEFT - 10.0, top + ROW - 1.5, &size(part.length_bytes));
    }
    let pages_per_cell = block.pages.div_ceil(rows * COLUMNS).max(1);
    let cells = block.pages.div_ceil(pages_per_cell);
    for row in 0..cells.div_ceil(COLUMNS) {
        let y = top + row as f64 * ROW;
        if rows > 3 && row % 8 == 0 && row > 0 {
            let offset = size((row * COLUMNS * pages_per_cell) << sterna_wire::PAGE_SHIFT);
            text(svg, "s r", LEFT - 10.0, y + ROW - 1.5, &offset);
        }
        let mut first = row * COLUMNS;
        let last = cells.min(first + COLUMNS);
        while first < last {
            let shade = shade(part, block, first, pages_per_cell);
            let mut end = first + 1;
            while end < last && self::shade(part, block, end, pages_per_cell) == shade {
                end += 1;
            }
            let x = LEFT + (first - row * COLUMNS) as f64 * CELL;
            let width = (end - first) as f64 * CELL;
            let from = (first * pages_per_cell) << sterna_wire::PAGE_SHIFT;
            let to = (end * pages_per_cell).min(block.pages) << sterna_wire::PAGE_SHIFT;
            let (class, words) = SHADES[shade];
            let _ = writeln!(
                svg,
                "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{}\"><title>{} {from:#x} \
                 to {to:#x}: {words}</title></rect>",
                ROW - 1.0,
                escape(&part.name)
            );
            first = end;
        }
    }
}

/// Index of a cell's shade.
fn shade(part: &BlockPart, block: &BlockCoverage, cell: u64, pages_per_cell: u64) -> usize {
    if part.is_skipped || part.absent_pages == part.pages {
        return 6;
    }
    let first = cell * pages_per_cell;
    let end = (first + pages_per_cell).min(block.pages);
    let (data, pages) = (block.data_in(first, end), end - first);
    match data {
        0 => 0,
        data if data == pages => 5,
        data => 1 + ((data * 4 - 1) / pages) as usize,
    }
}

fn legend(svg: &mut String, y: f64) {
    let mut x = LEFT;
    for (class, words) in SHADES {
        let _ =
            writeln!(svg, "<rect class=\"{class}\" x=\"{x}\" y=\"{}\" width=\"14\" height=\"10\"/>", y - 9.0);
        text(svg, "s", x + 19.0, y, words);
        x += 34.0 + words.len() as f64 * 5.6;
    }
}

fn text(svg: &mut String, class: &str, x: f64, y: f64, words: &str) {
    let _ = writeln!(svg, "<text class=\"{class}\" x=\"{x}\" y=\"{y}\">{}</text>", escape(words));
}

fn shorten(name: &str, most: usize) -> String {
    let count = name.chars().count();
    match count > most {
        true => format!("…{}", name.chars().skip(count - most + 1).collect::<String>()),
        false => name.to_owned(),
    }
}

fn size(bytes: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let decimals = usize::from(value.fract() > 0.0 && value < 100.0);
    format!("{value:.decimals$} {}", units[unit])
}

fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
