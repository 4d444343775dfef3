//! A strict parser of Prometheus' text format (version 0.0.4), and a client that fetches it.
//!
//! It refuses what Prometheus merely tolerates, so that a page that it accepts is accepted by every scraper.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// A family: its type, its help, and its samples by their labels.
#[derive(Debug, Default)]
pub(crate) struct Family {
    kind: String,
    samples: BTreeMap<BTreeMap<String, String>, f64>,
}

/// The families of a page by name.
#[derive(Debug)]
pub(crate) struct Exposition(BTreeMap<String, Family>);

impl Exposition {
    /// The value of the only sample of a family whose labels include these.
    pub(crate) fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let has = |of: &BTreeMap<String, String>| {
            labels.iter().all(|(label, value)| of.get(*label).is_some_and(|found| found == value))
        };
        let found: Vec<f64> =
            self.0.get(name)?.samples.iter().filter(|(of, _)| has(of)).map(|(_, value)| *value).collect();
        assert!(found.len() <= 1, "{name} {labels:?}: {found:?}");
        found.first().copied()
    }

    pub(crate) fn names(&self) -> Vec<&str> {
        self.0.keys().map(String::as_str).collect()
    }
}

/// Parses a page, or says in which line which rule is broken.
pub(crate) fn parse(text: &str) -> Result<Exposition, String> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err("the last line has no end".to_owned());
    }
    let mut families: BTreeMap<String, Family> = BTreeMap::new();
    let mut helped: Option<String> = None;
    let mut current: Option<String> = None;
    for (at, line) in text.lines().enumerate() {
        let bad = |why: &str| Err(format!("line {}: {why}: {line}", at + 1));
        if line.contains('\r') || line != line.trim_end() {
            return bad("a space or CR at the end");
        }
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let Some((name, help)) = rest.split_once(' ') else { return bad("HELP without a text") };
            if !is_name(name, true) || families.contains_key(name) || helped.is_some() {
                return bad("HELP of a bad name, or twice, or without TYPE");
            }
            if unescape(help, false).is_none() {
                return bad("HELP with a bad escape");
            }
            helped = Some(name.to_owned());
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else { return bad("TYPE without a type") };
            if helped.take().as_deref() != Some(name) {
                return bad("TYPE does not follow its HELP");
            }
            if !["counter", "gauge"].contains(&kind) {
                return bad("another type than counter and gauge");
            }
            if (kind == "counter") != name.ends_with("_total") {
                return bad("a counter, and only a counter, ends in _total");
            }
            families.insert(name.to_owned(), Family { kind: kind.to_owned(), ..Family::default() });
            current = Some(name.to_owned());
        } else if line.is_empty() || line.starts_with('#') {
            return bad("neither HELP, TYPE nor a sample");
        } else {
            let (name, labels, value) = match sample(line) {
                Ok(parts) => parts,
                Err(why) => return bad(&why),
            };
            let Some(family) =
                families.get_mut(&name).filter(|_| current.as_ref() == Some(&name) && helped.is_none())
            else {
                return bad("a sample outside of its family");
            };
            if family.kind == "counter" && value.is_nan() | (value < 0.0) {
                return bad("a counter below 0");
            }
            let names = |labels: &BTreeMap<String, String>| labels.keys().cloned().collect::<BTreeSet<_>>();
            if family.samples.keys().next().is_some_and(|first| names(first) != names(&labels)) {
                return bad("other labels than the sample before");
            }
            if family.samples.insert(labels, value).is_some() {
                return bad("a sample twice");
            }
        }
    }
    if helped.is_some() {
        return Err("HELP without TYPE at the end".to_owned());
    }
    match families.iter().find(|(_, family)| family.samples.is_empty()) {
        Some((name, _)) => Err(format!("{name} has no sample")),
        None => Ok(Exposition(families)),
    }
}

fn sample(line: &str) -> Result<(String, BTreeMap<String, String>, f64), String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    if !is_name(name, true) {
        return Err("a bad name".to_owned());
    }
    let mut labels = BTreeMap::new();
    if let Some(inner) = rest.strip_prefix('{') {
        rest = inner;
        loop {
            let (label, value) = rest.split_once("=\"").ok_or("a label without a value")?;
            if !is_name(label, false) || label.starts_with("__") {
                return Err(format!("bad label {label:?}"));
            }
            let end = end_of_value(value).ok_or("a value without an end")?;
            let text = unescape(&value[..end], true).ok_or("a bad escape")?;
            if labels.insert(label.to_owned(), text).is_some() {
                return Err(format!("label {label} twice"));
            }
            rest = &value[end + 1..];
            match rest.strip_prefix(',') {
                Some(more) => rest = more,
                None => break,
            }
        }
        rest = rest.strip_prefix('}').ok_or("labels without an end")?;
    }
    let value = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let is_number = value.chars().all(|c| c.is_ascii_digit() || "+-.eE".contains(c));
    if !is_number && !["NaN", "+Inf", "-Inf"].contains(&value) {
        return Err("a bad value (timestamps are not written)".to_owned());
    }
    Ok((name.to_owned(), labels, value.parse().map_err(|_| "a bad value")?))
}

/// The index of the quote that ends a label's value.
fn end_of_value(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    text.char_indices().find_map(|(at, c)| {
        let ends = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        ends.then_some(at)
    })
}

fn unescape(text: &str, with_quotes: bool) -> Option<String> {
    let (mut out, mut chars) = (String::new(), text.chars());
    while let Some(c) = chars.next() {
        out.push(match c {
            '\\' => match chars.next()? {
                '\\' => '\\',
                'n' => '\n',
                '"' if with_quotes => '"',
                _ => return None,
            },
            c => c,
        });
    }
    Some(out)
}

fn is_name(text: &str, with_colon: bool) -> bool {
    let is_start = |c: char| c.is_ascii_alphabetic() || c == '_' || (with_colon && c == ':');
    text.starts_with(is_start) && text.chars().all(|c| is_start(c) || c.is_ascii_digit())
}

/// Fetches `/metrics` at a port of this host, and parses it.
pub(crate) fn fetch(port: u16) -> Exposition {
    let mut client = TcpStream::connect(("127.0.0.1", port)).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    client.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n").unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    parse(body).unwrap_or_else(|why| panic!("{why}\n{body}"))
}

#[test]
fn parser_accepts_pages_and_refuses_each_broken_rule() {
    let good = "# HELP a_b:c Text \\n \\\\.\n# TYPE a_b:c gauge\na_b:c{x=\"1\\\"\\\\\\n,}\",y=\"\"} +Inf\na_b:c{x=\"2\",y=\"\"} -1.5e3\n\
                # HELP d_total T.\n# TYPE d_total counter\nd_total 7\n";
    let page = parse(good).unwrap();
    assert_eq!(page.value("a_b:c", &[("x", "1\"\\\n,}")]), Some(f64::INFINITY));
    assert_eq!((page.value("a_b:c", &[("x", "2")]), page.value("d_total", &[])), (Some(-1500.0), Some(7.0)));
    assert!(parse("").is_ok());

    let family = "# HELP a T.\n# TYPE a gauge\n";
    for (text, why) in [
        ("a 1\n", "outside"),
        ("# TYPE a gauge\na 1\n", "does not follow"),
        ("# HELP a T.\na 1\n", "outside"),
        ("# HELP a T.\n# TYPE b gauge\nb 1\n", "does not follow"),
        ("# HELP a T.\n# TYPE a gauge\na 1\n# HELP a T.\n# TYPE a gauge\na 2\n", "twice"),
        ("# HELP a T.\n# TYPE a histogram\na 1\n", "another type"),
        ("# HELP a T.\n# TYPE a counter\na 1\n", "_total"),
        ("# HELP a_total T.\n# TYPE a_total counter\na_total -1\n", "below 0"),
        ("# HELP 1a T.\n# TYPE 1a gauge\n1a 1\n", "bad name"),
        ("# HELP a-b T.\n# TYPE a-b gauge\na-b 1\n", "bad name"),
        ("# HELP a T\\x.\n# TYPE a gauge\na 1\n", "bad escape"),
        (&format!("{family}b 1\n"), "outside"),
        (&format!("{family}a 1\na 1\n"), "twice"),
        (&format!("{family}a{{x=\"1\"}} 1\na{{x=\"1\"}} 2\n"), "twice"),
        (&format!("{family}a{{x=\"1\",x=\"2\"}} 1\n"), "twice"),
        (&format!("{family}a{{x=\"1\"}} 1\na{{y=\"1\"}} 2\n"), "other labels"),
        (&format!("{family}a{{x=1}} 1\n"), "without a value"),
        (&format!("{family}a{{x:y=\"1\"}} 1\n"), "bad label"),
        (&format!("{family}a{{__x=\"1\"}} 1\n"), "bad label"),
        (&format!("{family}a{{x=\"\"\"}} 1\n"), "without an end"),
        (&format!("{family}a{{x=\"\\t\"}} 1\n"), "bad escape"),
        (&format!("{family}a{{x=\"1\n\"}} 1\n"), "without an end"),
        (&format!("{family}a{{x=\"1\" 1\n"), "without an end"),
        (&format!("{family}a{{}} 1\n"), "without a value"),
        (&format!("{family}a one\n"), "bad value"),
        (&format!("{family}a 1 1700000000\n"), "bad value"),
        (&format!("{family}a\n"), "no value"),
        (&format!("{family}a 1"), "no end"),
        (&format!("{family}a 1 \n"), "at the end"),
        (&format!("{family}\na 1\n"), "neither"),
        (family, "no sample"),
        ("# HELP a T.\n", "without TYPE"),
    ] {
        let refused = parse(text).expect_err(text);
        assert!(refused.contains(why), "{text}: {refused}");
    }
}
