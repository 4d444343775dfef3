//! The output of the human monitor's `info` commands.

use std::fmt::Write as _;

use serde_json::Value;

use crate::migration::capabilities::{CAPABILITIES, CapabilitySet};
use crate::migration::parameters::{PARAMETERS, ParameterSet};

/// The output of `info migrate`, from the answer to `query-migrate`. `all` adds rarely needed values.
pub(super) fn migrate(query: &Value, all: bool) -> String {
    let Some(status) = query["status"].as_str() else {
        return "No migration has been started\r\n".into();
    };
    let mut text = String::new();
    let mut line = |line: String| {
        // Writing to a String cannot fail.
        let _ = write!(text, "{line}\r\n");
    };
    line(match query["x-sterna-undecided"].as_bool() {
        Some(true) => format!("Status: \t\t{status} (undecided)"),
        _ => format!("Status: \t\t{status}"),
    });
    if let Some(reason) = query["error-desc"].as_str() {
        line(format!("Error: \t\t\t{reason}"));
    }
    let times = [
        ("total-time", "total"),
        ("setup-time", "setup"),
        ("expected-downtime", "exp_down"),
        ("downtime", "down"),
    ];
    let times: Vec<_> = times
        .iter()
        .filter_map(|(name, short)| Some(format!("{short}={}", query[*name].as_u64()?)))
        .collect();
    if !times.is_empty() {
        line(format!("Time (ms): \t\t{}", times.join(", ")));
    }
    if let Some(addresses) = query["socket-address"].as_array() {
        for address in addresses {
            line(format!("Socket address: \t{address}"));
        }
    }
    if let Some(address) = query.get("x-sterna-address") {
        line(format!("Address: \t\t{address}"));
    }
    if let Some(missing) = query["x-sterna-missing-bytes"].as_u64() {
        line(format!("Loaded first: \t\t{}", human(missing)));
    }
    if let Some(percent) = query["cpu-throttle-percentage"].as_u64() {
        line(format!("CPU Throttle (%): \t{percent}"));
    }
    if query["ram"].is_object() {
        ram(&query["ram"], all, &mut line);
    }
    if query["x-sterna-rdma"].is_object() {
        rdma(query, &mut line);
    }
    if query["postcopy-latency-dist"].is_array() {
        blocktime(query, &mut line);
    }
    text
}

/// The lines about the time that vCPUs waited for pages.
fn blocktime(query: &Value, line: &mut impl FnMut(String)) {
    let number = |name: &str| query[name].as_u64().unwrap_or(0);
    line(format!("Postcopy Blocktime (ms): {}", number("postcopy-blocktime")));
    line(format!("Postcopy vCPU Blocktime (ms): {}", query["postcopy-vcpu-blocktime"]));
    line(format!("Postcopy Latency (ns): {}", number("postcopy-latency")));
    line(format!("Postcopy non-vCPU Latencies (ns): {}", number("postcopy-non-vcpu-latency")));
    line(format!("Postcopy vCPU Latencies (ns): {}", query["postcopy-vcpu-latency"]));
    line("Postcopy Latency Distribution:".into());
    let buckets = query["postcopy-latency-dist"].as_array().into_iter().flatten().enumerate();
    for (at, count) in buckets.filter(|(_, count)| count.as_u64().unwrap_or(0) > 0) {
        line(format!("  [ {:>8} us - {:>8} us ]: {count}", 1u64 << at, 1u64 << (at + 1)));
    }
}

fn rdma(query: &Value, line: &mut impl FnMut(String)) {
    let count = |name: &str| query["x-sterna-rdma"][name].as_u64().unwrap_or(0);
    let size = |name: &str| human(count(name));
    line("RDMA info:".into());
    let pinned = format!("registrations={}, pinned={}", count("registrations"), size("pinned-bytes"));
    if query["x-sterna-rdma"].get("writes").is_none() {
        line(format!("  Memory: \t\t{pinned}"));
        line(format!("  Commands: \t\tall={}, zero_ranges={}", count("commands"), count("zero-ranges")));
        return;
    }
    let (written, in_flight) = (size("written-bytes"), size("in-flight-bytes"));
    line(format!("  Writes: \t\tcount={}, written={written}, in_flight={in_flight}", count("writes")));
    line(format!("  Memory: \t\t{pinned}"));
    let pinned = size("destination-pinned-bytes");
    line(format!("  Destination memory: \twindows={}, pinned={pinned}", count("windows")));
    let (exchanges, not_ready) = (count("exchanges"), count("receiver-not-ready"));
    line(format!("  Messages: \t\texchanges={exchanges}, receiver_not_ready={not_ready}"));
}

fn ram(ram: &Value, all: bool, line: &mut impl FnMut(String)) {
    let count = |name: &str| ram[name].as_u64().unwrap_or(0);
    let size = |name: &str| human(count(name));
    line("RAM info:".into());
    line(format!("  Throughput (Mbps): \t{:.2}", ram["mbps"].as_f64().unwrap_or(0.0)));
    line(format!("  Sizes: \t\tpagesize={}, total={}", size("page-size"), size("total")));
    line(format!("  Transfers: \t\ttransferred={}, remain={}", size("transferred"), size("remaining")));
    line(format!(
        "    Channels: \t\tprecopy={}, multifd={}, postcopy={}",
        size("precopy-bytes"),
        size("multifd-bytes"),
        size("postcopy-bytes")
    ));
    line(format!("    Page Types: \tnormal={}, zero={}", count("normal"), count("duplicate")));
    line(format!(
        "  Page Rates (pps): \ttransfer={}, dirty={}",
        count("pages-per-second"),
        count("dirty-pages-rate")
    ));
    line(format!("  Others: \t\tdirty_syncs={}", count("dirty-sync-count")));
    if all {
        line(format!("  Downtime bytes: \t{}", size("downtime-bytes")));
    }
}

/// The output of `info migrate_parameters`.
pub(super) fn parameters(set: &ParameterSet) -> String {
    let mut text = String::new();
    for spec in PARAMETERS {
        let value = match set.get(spec.name) {
            Some(Value::String(word)) if word.is_empty() => "''".to_owned(),
            Some(Value::String(word)) => word.clone(),
            Some(Value::Bool(on)) => on_off(*on).to_owned(),
            Some(other) => other.to_string(),
            None => continue,
        };
        let only = spec.only_for.map_or(String::new(), |only| format!(" (only for {only})"));
        let _ = write!(text, "{}: {value}{}{only}\r\n", spec.name, spec.unit.suffix());
    }
    text
}

/// The output of `info migrate_capabilities`.
pub(super) fn capabilities(set: &CapabilitySet) -> String {
    CAPABILITIES.iter().map(|spec| format!("{}: {}\r\n", spec.name, on_off(set.get(spec.name)))).collect()
}

/// The output of `info dirty_rate`, from the answer to `query-dirty-rate` in seconds.
pub(super) fn dirty_rate(query: &Value) -> String {
    let mut text = String::new();
    let mut line = |line: String| {
        let _ = write!(text, "{line}\r\n");
    };
    let word = |name: &str| query[name].as_str().unwrap_or_default();
    let number = |name: &str| query[name].as_u64().unwrap_or(0);
    line(format!("Status: {}", word("status")));
    line(format!("Start Time: {} (ms)", number("start-time")));
    line(format!("Period: {} (sec)", number("calc-time")));
    line(format!("Mode: {}", word("mode")));
    match query["dirty-rate"].as_u64() {
        Some(rate) => line(format!("Dirty rate: {rate} (MB/s)")),
        None => line("Dirty rate: (not ready)".into()),
    }
    for vcpu in query["vcpu-dirty-rate"].as_array().into_iter().flatten() {
        line(format!("vcpu[{}], Dirty rate: {} (MB/s)", vcpu["id"], vcpu["dirty-rate"]));
    }
    if let Some(why) = query["x-sterna-error"].as_str() {
        line(format!("Error: {why}"));
    }
    text
}

/// The output of `info vcpu_dirty_limit`, from the answer to `query-vcpu-dirty-limit`.
pub(super) fn dirty_limits(query: &Value) -> String {
    let limits = query.as_array().map_or(&[][..], Vec::as_slice);
    if limits.is_empty() {
        return "Dirty page limit not enabled!\r\n".into();
    }
    let line = |vcpu: &Value| {
        format!(
            "vcpu[{}], limit rate {} (MB/s), current rate {} (MB/s)\r\n",
            vcpu["cpu-index"], vcpu["limit-rate"], vcpu["current-rate"]
        )
    };
    limits.iter().map(line).collect()
}

/// The output of `info status`.
pub(super) fn status(run_state: &str) -> String {
    match run_state {
        "running" => "VM status: running\r\n".into(),
        "paused" => "VM status: paused\r\n".into(),
        other => format!("VM status: paused ({other})\r\n"),
    }
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// A size with three or four digits and a unit.
fn human(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut scaled = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if scaled < 1000.0 {
            break;
        }
        scaled /= 1024.0;
        unit = next;
    }
    if scaled.fract() == 0.0 { format!("{scaled:.0} {unit}") } else { format!("{scaled:.3} {unit}") }
}
