//! The results as an SVG picture: for each number of devices, the spread of the downtime over channels.

use super::downtime::{Results, Setting};
use crate::report::axis::Axis;
use crate::report::svg::Svg;
use crate::units;

const WIDTH: f64 = 1080.0;
const LEFT: f64 = 86.0;
const RIGHT: f64 = 1062.0;
const TOP: f64 = 44.0;
const CHART: f64 = 170.0;
const GAP: f64 = 66.0;
const BOX: f64 = 22.0;

/// The text of the SVG file.
pub fn picture(results: &Results) -> String {
    let mut devices: Vec<u32> = results.settings.iter().map(|setting| setting.devices).collect();
    devices.dedup();
    let height = TOP + devices.len() as f64 * (CHART + GAP);
    let style = include_str!("../report/style.css");
    let mut svg = Svg::file(WIDTH, height, "Downtime over devices and channels", style);
    for (row, count) in devices.iter().enumerate() {
        let settings: Vec<&Setting> = results.settings.iter().filter(|s| s.devices == *count).collect();
        chart(&mut svg, *count, &settings, TOP + row as f64 * (CHART + GAP));
    }
    svg.finish()
}

/// A chart: boxes span the first to the third quartile, with a line at the median. Thin lines span the
/// minimum to the 99th percentile.
fn chart(svg: &mut Svg, devices: u32, settings: &[&Setting], top: f64) {
    let most = settings.iter().map(|setting| setting.downtime().quantile(0.99)).fold(0.0, f64::max);
    let axis = Axis::time(most / 1e3);
    let y = |milliseconds: f64| top + CHART * (1.0 - axis.at(milliseconds / 1e3));
    svg.text("title", LEFT, top - 12.0, &format!("{devices} devices: downtime"));
    for (value, words) in &axis.ticks {
        let height = y(*value * 1e3);
        svg.line("grid", LEFT, height, RIGHT, height);
        svg.text("y-label", LEFT - 8.0, height + 4.0, words);
    }
    let step = (RIGHT - LEFT) / settings.len().max(1) as f64;
    for (place, setting) in settings.iter().enumerate() {
        let middle = LEFT + (place as f64 + 0.5) * step;
        let downtime = setting.downtime();
        let at = |part| y(downtime.quantile(part));
        let tip = format!(
            "{devices} devices, {} channels: median {}\nleast {}, 99 % {}\n{} runs",
            setting.channels,
            units::seconds(downtime.median() / 1e3),
            units::seconds(downtime.quantile(0.0) / 1e3),
            units::seconds(downtime.quantile(0.99) / 1e3),
            setting.samples.len(),
        );
        svg.line("tick", middle, at(0.99), middle, at(0.0));
        let height = (at(0.25) - at(0.75)).max(2.0);
        svg.rect("odd", middle - BOX / 2.0, at(0.75), BOX, height, &tip);
        svg.line("base", middle - BOX, at(0.5), middle + BOX, at(0.5));
        let words = if setting.channels == 0 { "in turn".to_owned() } else { setting.channels.to_string() };
        svg.text("x-label", middle, top + CHART + 18.0, &words);
    }
    svg.text("x-label", (LEFT + RIGHT) / 2.0, top + CHART + 36.0, "multifd channels");
}
