//! Prometheus' text format, version 0.0.4.
//!
//! The values come from snapshots of sessions that begin and end. A registry of a client library would need a handle for
//! each session, and its removal; a page that is written for each request needs neither. The format itself is HELP, TYPE
//! and sample lines.

use std::fmt::Write as _;

/// The media type of a page.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The type of a family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A sum that never becomes smaller. Its name ends in `_total`.
    Counter,
    /// A value that becomes larger and smaller.
    Gauge,
}

/// Names and values of a sample's labels.
pub type Labels = Vec<(&'static str, String)>;

/// A page that is written, family by family.
#[derive(Debug, Default)]
pub struct Page {
    text: String,
    names: Vec<&'static str>,
}

impl Page {
    /// A page without families.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes a family of metrics with its samples; nothing if there are none.
    ///
    /// # Panics
    /// In debug builds if the name is not one of Prometheus, or was written before.
    pub fn family(
        &mut self,
        name: &'static str,
        kind: Kind,
        help: &str,
        samples: impl IntoIterator<Item = (Labels, f64)>,
    ) {
        debug_assert!(is_name(name) && (kind == Kind::Counter) == name.ends_with("_total"), "{name}");
        debug_assert!(!self.names.contains(&name), "{name} is written twice");
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        self.names.push(name);
        let kind = match kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
        };
        let help = help.replace('\\', "\\\\").replace('\n', "\\n");
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            self.text.push_str(name);
            for (index, (label, value)) in labels.iter().enumerate() {
                debug_assert!(is_name(label) && !label.contains(':'), "{label}");
                self.text.push(if index == 0 { '{' } else { ',' });
                let _ = write!(self.text, "{label}=\"{}\"", escaped(value));
            }
            if !labels.is_empty() {
                self.text.push('}');
            }
            let _ = writeln!(self.text, " {}", number(value));
        }
    }

    /// The text of the page.
    pub fn finish(self) -> String {
        self.text
    }
}

/// A label's value between quotes.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        // Rust writes no exponent, so that counters of bytes stay readable.
        value.to_string()
    }
}

fn is_name(name: &str) -> bool {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == ':';
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_' || c == ':') && name.chars().all(is_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_escapes_what_would_end_a_label_or_a_line() {
        let mut page = Page::new();
        page.family(
            "a_bytes",
            Kind::Gauge,
            "One\nline \\ two.",
            [(vec![("route", "a\"b\\c\nd".to_owned())], 1.5)],
        );
        page.family("none", Kind::Gauge, "No samples.", []);
        page.family("b_total", Kind::Counter, "Sum.", [(Vec::new(), 12_345_678_901.0)]);

        let wanted = "# HELP a_bytes One\\nline \\\\ two.\n# TYPE a_bytes gauge\na_bytes{route=\"a\\\"b\\\\c\\nd\"} 1.5\n\
                      # HELP b_total Sum.\n# TYPE b_total counter\nb_total 12345678901\n";
        assert_eq!(page.finish(), wanted);
    }

    #[test]
    fn numbers_have_the_spelling_of_prometheus() {
        let spelled = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, 1e21].map(number);

        assert_eq!(spelled, ["NaN", "+Inf", "-Inf", "0", "1000000000000000000000"]);
    }
}
