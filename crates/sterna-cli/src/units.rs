//! Sizes, rates and times: parsers for the command line, and formats for people.
//!
//! Sizes and rates are binary (1 MiB = 1024 KiB) and shown with binary units. Times use the unit that leaves
//! two to four digits. Rates of links are decimal, as vendors state them ([`decimal_rate`]).

use std::time::Duration;

/// Bytes of a guest page, as on the wire (specs/stream.md §1.2).
pub const PAGE_BYTES: u64 = 4096;

/// Parses `64M`, `4G`, `1.5GiB`, `0.5t`.
/// A number without a unit is refused, because QEMU reads it as MiB in some places and as bytes in others.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let shift = match unit.to_ascii_lowercase().as_str() {
        "k" | "kib" => 10,
        "m" | "mib" => 20,
        "g" | "gib" => 30,
        "t" | "tib" => 40,
        "b" => 0,
        "" => return Err(format!("`{text}` has no unit: write {text}M or {text}G")),
        other => return Err(format!("`{other}` is not a unit of size: use K, M, G or T (powers of 1024)")),
    };
    let value: f64 = number.trim().parse().map_err(|_| format!("`{number}` is not a number"))?;
    let bytes = value * f64::from(1u32 << 10).powi(shift / 10);
    if !(bytes.is_finite() && (0.0..9.0e18).contains(&bytes)) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(bytes.round() as u64)
}

/// Parses `15GB/s`, `1.5GiB/s`, `10Gbit/s` to bytes per second.
/// kB, MB, GB and TB are powers of 1000. A byte has eight bits.
pub fn parse_rate(text: &str) -> Result<u64, String> {
    let hint = "write GB/s or MB/s (powers of 1000), GiB/s or MiB/s (powers of 1024), or Gbit/s or Mbit/s";
    let (number, unit) = split(text);
    let unit = match unit.strip_suffix("/s") {
        Some(unit) => unit,
        None if unit.is_empty() => return Err(format!("`{text}` has no unit: {hint}")),
        None => return Err(format!("`{unit}` is not a unit of rate: {hint}")),
    };
    let (prefix, size) = if let Some(prefix) = unit.strip_suffix("bit") {
        (prefix, 1.0 / 8.0)
    } else if let Some(prefix) = unit.strip_suffix('B') {
        (prefix, 1.0)
    } else {
        return Err(format!("`{unit}/s` is not a unit of rate: {hint}"));
    };
    let factor: f64 = match prefix {
        "" => 1.0,
        "k" | "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "Ki" => f64::from(1u32 << 10),
        "Mi" => f64::from(1u32 << 20),
        "Gi" => f64::from(1u32 << 30),
        "Ti" => (1u64 << 40) as f64,
        _ => return Err(format!("`{unit}/s` is not a unit of rate: {hint}")),
    };
    let rate = self::number(number)? * factor * size;
    if !(0.0..9.0e18).contains(&rate) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(rate.round() as u64)
}

/// Parses a rate that is not 0.
pub fn parse_bandwidth(text: &str) -> Result<u64, String> {
    match parse_rate(text)? {
        0 => Err(format!("`{text}` is no bandwidth: it must be above 0")),
        rate => Ok(rate),
    }
}

/// Parses `73ms`, `500us`, `1.5s`.
pub fn parse_time(text: &str) -> Result<Duration, String> {
    let (number, unit) = split(text);
    let factor = match unit {
        "s" => 1.0,
        "ms" => 1e-3,
        "us" | "µs" => 1e-6,
        "min" => 60.0,
        "" => return Err(format!("`{text}` has no unit: write {text}ms or {text}s")),
        other => return Err(format!("`{other}` is not a unit of time: use us, ms, s or min")),
    };
    let seconds = self::number(number)? * factor;
    if !(0.0..=1e6).contains(&seconds) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(Duration::from_nanos((seconds * 1e9).round() as u64))
}

fn split(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| c.is_alphabetic() || c == '/').unwrap_or(text.len());
    (text[..at].trim(), &text[at..])
}

fn number(text: &str) -> Result<f64, String> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    text.parse().ok().filter(|_| digits).ok_or_else(|| format!("`{text}` is not a number"))
}

/// Parses `--ram`: a whole number of pages above 0.
pub fn parse_ram(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes == 0 || bytes % PAGE_BYTES != 0 {
        return Err(format!("`{text}` is not a whole number of 4 KiB pages above 0"));
    }
    Ok(bytes)
}

/// Formats a size: `1.50 GiB`, `312 MiB`, `17 bytes`.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, &["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// Formats a binary rate: `1.50 GiB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    scaled(bytes_per_second, &["bytes/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"])
}

/// Formats a link's rate in powers of 1000: `15.0 GB/s`.
pub fn decimal_rate(bytes_per_second: f64) -> String {
    let units = ["bytes/s", "kB/s", "MB/s", "GB/s", "TB/s", "PB/s"];
    let mut value = if bytes_per_second.is_finite() { bytes_per_second.max(0.0) } else { 0.0 };
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", units[0]) } else { format!("{} {}", digits(value), units[unit]) }
}

/// As [`seconds`], for a `Duration`.
pub fn time(time: Duration) -> String {
    seconds(time.as_secs_f64())
}

/// Formats a time: `12.3 ms`, `4.56 s`, `3 min 20 s`.
pub fn seconds(value: f64) -> String {
    match value {
        v if !v.is_finite() => "–".into(),
        v if v <= 0.0 => "0 s".into(),
        v if v < 1e-3 => format!("{} µs", digits(v * 1e6)),
        v if v < 1.0 => format!("{} ms", digits(v * 1e3)),
        v if v < 120.0 => format!("{} s", digits(v)),
        v => format!("{} min {} s", (v / 60.0) as u64, (v % 60.0) as u64),
    }
}

/// Formats a count: `1 234 567`, with narrow no-break spaces.
pub fn count(value: u64) -> String {
    let plain = value.to_string();
    let mut grouped = String::with_capacity(plain.len() * 2);
    for (at, digit) in plain.chars().enumerate() {
        if at > 0 && (plain.len() - at).is_multiple_of(3) {
            grouped.push('\u{202f}');
        }
        grouped.push(digit);
    }
    grouped
}

/// Formats with at least three significant digits, and without digits that were not measured.
fn digits(value: f64) -> String {
    match value {
        v if v < 9.995 => format!("{v:.2}"),
        v if v < 99.95 => format!("{v:.1}"),
        v => format!("{v:.0}"),
    }
}

fn scaled(value: f64, units: &[&str]) -> String {
    let mut value = if value.is_finite() { value.max(0.0) } else { 0.0 };
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{value:.0} {}", units[0]) } else { format!("{} {}", digits(value), units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parse_size_with_each_unit_gives_bytes() {
        assert_eq!(parse_size("64M"), Ok(64 << 20));
        assert_eq!(parse_size("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse_size("2t"), Ok(2 << 40));
        assert_eq!(parse_size("4096b"), Ok(4096));
        assert_eq!(parse_size("4 k"), Ok(4096));
    }

    #[test]
    fn parse_size_of_nonsense_says_what_to_write() {
        assert!(parse_size("64").unwrap_err().contains("64M"));
        for bad in ["", "G", "-1G", "1X", "nanG", "1e30T", "0x10M"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
        assert!(parse_ram("0M").is_err() && parse_ram("1K").is_err());
    }

    #[test]
    fn parse_rate_tells_decimal_binary_and_bits_apart() {
        assert_eq!(parse_rate("15GB/s"), Ok(15_000_000_000));
        assert_eq!(parse_rate("1.5 GiB/s"), Ok(3 << 29));
        assert_eq!(parse_rate("10Gbit/s"), Ok(1_250_000_000));
        assert_eq!(parse_rate("800kbit/s"), Ok(100_000));
        assert_eq!(parse_rate("0B/s"), Ok(0));
        for bad in
            ["15", "15GB", "15Gb/s", "15Gbps", "GB/s", "-1GB/s", "1e3GB/s", "infGB/s", "9999999999TB/s", ""]
        {
            assert!(parse_rate(bad).is_err(), "{bad}");
        }
        assert!(parse_rate("15Gb/s").unwrap_err().contains("Gbit/s"));
        assert!(parse_bandwidth("0GB/s").is_err());
    }

    #[test]
    fn parse_time_takes_each_unit() {
        assert_eq!(parse_time("73ms"), Ok(Duration::from_millis(73)));
        assert_eq!(parse_time("2.5ms"), Ok(Duration::from_micros(2500)));
        assert_eq!(parse_time("12us"), Ok(Duration::from_micros(12)));
        assert_eq!(parse_time("1 s"), Ok(Duration::from_secs(1)));
        for bad in ["73", "ms", "-1ms", "1h", "99999min", "NaNs"] {
            assert!(parse_time(bad).is_err(), "{bad}");
        }
        assert!(parse_time("73").unwrap_err().contains("73ms"));
    }

    #[test]
    fn decimal_rates_read_well() {
        assert_eq!(decimal_rate(7.7e9), "7.70 GB/s");
        assert_eq!(decimal_rate(999.7e6), "1.00 GB/s");
        assert_eq!(decimal_rate(12.0), "12 bytes/s");
    }

    #[test]
    fn sizes_rates_and_times_read_well() {
        assert_eq!(bytes(17), "17 bytes");
        assert_eq!(bytes(4 << 30), "4.00 GiB");
        assert_eq!(bytes(1 << 20), "1.00 MiB");
        assert_eq!(bytes(1023 << 20), "1.00 GiB");
        assert_eq!(rate(2.5 * 1024.0 * 1024.0), "2.50 MiB/s");
        assert_eq!(rate(f64::NAN), "0 bytes/s");
        assert_eq!(seconds(0.000_012), "12.0 µs");
        assert_eq!(seconds(0.0423), "42.3 ms");
        assert_eq!(seconds(7.0), "7.00 s");
        assert_eq!(seconds(200.0), "3 min 20 s");
        assert_eq!(count(1_234_567), "1\u{202f}234\u{202f}567");
        assert_eq!(count(12), "12");
    }
}
