//! The results as tables: medians in the published form, and the parts of the downtime.

use comfy_table::{Cell, CellAlignment, Table, presets};

use super::downtime::{Results, Setting};
use super::sample::Distribution;
use crate::units;

/// Both tables, with text that explains them.
pub fn tables(results: &Results) -> String {
    let rate = match results.device_rate {
        0 => "unlimited speed".to_owned(),
        rate => units::decimal_rate(rate as f64),
    };
    let limit = match results.max_bandwidth {
        0 => String::new(),
        rate => format!(" Bandwidth limit {}.", units::decimal_rate(rate as f64)),
    };
    let mut text = format!(
        "Downtime, ms: median. {} of state in each device, read and loaded at {rate}; {} % of it while the guest \
         runs.{limit}\nchannels 0: one device after the other over the main channel.\n{}\n\n",
        units::bytes(results.state_bytes),
        results.precopy_percent,
        medians(results)
    );
    text.push_str("Parts of the downtime, ms (medians; along the slowest path):\n");
    text.push_str(&format!("{}\n", parts(results)));
    text.push_str(&ratios(results));
    text.push_str(
        "Plain copy: each device over a separate connection, with one thread at each end, without a migration.\n",
    );
    text
}

fn medians(results: &Results) -> Table {
    let (devices, channels) = axes(results);
    let mut table = empty();
    let heads = channels.iter().map(|channels| right(&channels.to_string()));
    table.set_header(std::iter::once(Cell::new("devices \\ channels")).chain(heads));
    for count in devices {
        let cells = channels.iter().map(|channels| {
            let setting = results.settings.iter().find(|s| (s.devices, s.channels) == (count, *channels));
            right(&setting.map_or_else(String::new, |setting| format!("{:.0}", setting.downtime().median())))
        });
        table.add_row(std::iter::once(right(&count.to_string())).chain(cells));
    }
    table
}

fn parts(results: &Results) -> Table {
    let mut table = empty();
    let heads = [
        "devices",
        "channels",
        "runs",
        "min",
        "25 %",
        "median",
        "75 %",
        "99 %",
        "stop",
        "save",
        "transfer",
        "load",
        "start",
        "held at most",
        "live RAM",
        "live devices",
    ];
    table.set_header(heads.map(right));
    for setting in &results.settings {
        let downtime = setting.downtime();
        let quantiles =
            [0.0, 0.25, 0.5, 0.75, 0.99].map(|part| right(&format!("{:.1}", downtime.quantile(part))));
        let part = |of: fn(&super::sample::Sample) -> f64| {
            right(&format!("{:.1}", setting.distribution(of).median()))
        };
        let rate = |of: fn(&super::sample::Sample) -> f64| {
            right(&units::decimal_rate(setting.distribution(of).median()))
        };
        let held = setting.samples.iter().map(|sample| sample.peak_bytes).max().unwrap_or_default();
        let counts = [setting.devices as usize, usize::from(setting.channels), setting.samples.len()];
        let row = counts.map(|count| right(&count.to_string())).into_iter().chain(quantiles).chain([
            part(|sample| sample.stop),
            part(|sample| sample.save),
            part(|sample| sample.transfer),
            part(|sample| sample.load),
            part(|sample| sample.start),
            right(&units::bytes(held)),
            rate(|sample| sample.live_ram),
            rate(|sample| sample.live_streams),
        ]);
        table.add_row(row);
    }
    table
}

/// Compares medians: the cost of more devices, and the effect of more channels.
fn ratios(results: &Results) -> String {
    let (devices, _) = axes(results);
    let median = |setting: &&Setting| setting.downtime().median();
    let of = |count: u32, parallel: bool| {
        let settings = results.settings.iter();
        let settings = settings.filter(move |s| s.devices == count && (s.channels > 0) == parallel);
        let medians: Vec<f64> = settings.collect::<Vec<_>>().iter().map(median).collect();
        let best = medians.iter().copied().fold(f64::INFINITY, f64::min);
        let worst = medians.iter().copied().fold(0.0, f64::max);
        (!medians.is_empty()).then_some((best, worst))
    };
    let mut text = String::new();
    let one = devices.first().and_then(|first| of(*first, true));
    for count in &devices {
        let Some((best, worst)) = of(*count, true) else { continue };
        let plain = results.plain.iter().find(|plain| plain.devices == *count);
        let plain = plain.map_or(f64::NAN, |plain| Distribution::new(plain.times.iter().copied()).median());
        let against = one.map_or_else(String::new, |(one, _)| {
            format!(", {:.2} of the time of {} devices", best / one, devices[0])
        });
        let serial = of(*count, false).map_or_else(String::new, |(serial, _)| {
            format!("; one after the other takes {:.2} times as long", serial / best)
        });
        text.push_str(&format!(
            "{count} devices: best median {best:.0} ms, {:.2} of the plain copy's {plain:.0} ms{against}; the worst \
             channel count's is {:.2} of it{serial}\n",
            best / plain,
            worst / best
        ));
    }
    text
}

fn axes(results: &Results) -> (Vec<u32>, Vec<u8>) {
    let (mut devices, mut channels) = (Vec::new(), Vec::new());
    for setting in &results.settings {
        if !devices.contains(&setting.devices) {
            devices.push(setting.devices);
        }
        if !channels.contains(&setting.channels) {
            channels.push(setting.channels);
        }
    }
    (devices, channels)
}

fn empty() -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table
}

fn right(text: &str) -> Cell {
    Cell::new(text).set_alignment(CellAlignment::Right)
}
