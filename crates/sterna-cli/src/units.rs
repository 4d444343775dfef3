//! Sizes, rates and times: read from the command line, written for people.
//!
//! Sizes and rates are binary (1 MiB = 1024 KiB) and say so; times choose the unit that leaves two to four
//! digits.

/// Bytes of a guest page, as on the wire (specs/stream.md §1.2).
pub const PAGE_BYTES: u64 = 4096;

/// Reads `64M`, `4G`, `1.5GiB`, `0.5t`. A number without a unit is refused, for QEMU reads it as MiB in some
/// places and as bytes in others.
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
        other => return Err(format!("`{other}` is no unit of size: use K, M, G or T (powers of 1024)")),
    };
    let value: f64 = number.trim().parse().map_err(|_| format!("`{number}` is not a number"))?;
    let bytes = value * f64::from(1u32 << 10).powi(shift / 10);
    if !(bytes.is_finite() && (0.0..9.0e18).contains(&bytes)) {
        return Err(format!("`{text}` is out of range"));
    }
    Ok(bytes.round() as u64)
}

/// `--ram`: a whole number of pages and not nothing.
pub fn parse_ram(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes == 0 || bytes % PAGE_BYTES != 0 {
        return Err(format!("`{text}` is not a whole number of 4 KiB pages above 0"));
    }
    Ok(bytes)
}

/// `1.50 GiB`, `312 MiB`, `17 bytes`.
pub fn bytes(count: u64) -> String {
    scaled(count as f64, &["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"])
}

/// `1.50 GiB/s`.
pub fn rate(bytes_per_second: f64) -> String {
    scaled(bytes_per_second, &["bytes/s", "KiB/s", "MiB/s", "GiB/s", "TiB/s"])
}

/// `12.3 ms`, `4.56 s`, `3 min 20 s`.
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

/// `1 234 567`: thousands apart by a thin space that does not break.
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

/// At least three significant digits, no false precision.
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
