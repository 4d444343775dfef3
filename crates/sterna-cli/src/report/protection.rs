//! The page of a protection: states as bands, and below them charts over the same time.
//! The charts show pauses, ages, sizes and waiting output.

use super::axis::Axis;
use super::keys::keys;
use super::layout::{self, FOOT, GAP, LEFT, RIGHT, WIDTH, x};
use super::svg::{Svg, escape};
use super::table::Table;
use super::{document, tables};
use crate::protection_record::{GuestAt, Part, ProtectionRecord};
use crate::units;

const BANDS_TOP: f64 = 32.0;
const BAND: f64 = 30.0;
const CHART: f64 = 100.0;

/// The complete HTML page.
pub fn page(record: &ProtectionRecord) -> String {
    let mut body = head(record);
    body.push_str("<section>\n<h2>Course</h2>\n");
    body.push_str(&course(record));
    body.push_str("</section>\n");
    body.push_str(&changes(record));
    body.push_str(&tables::figures(&rows(record)));
    document(&format!("Protection – {}", record.state), &body)
}

fn guest_at(record: &ProtectionRecord) -> &'static str {
    match record.guest_at {
        Some(GuestAt::Primary) => "primary",
        Some(GuestAt::Standby) => "standby",
        None => "not decided",
    }
}

fn head(record: &ProtectionRecord) -> String {
    let is_good = match &*record.state {
        "protected" | "handed over" | "taken over" => true,
        "alone" => !record.changes.iter().any(|change| is_out(&change.state)),
        _ => false,
    };
    let mut html = format!(
        "<header>\n<h1>Protection</h1>\n<p class=\"way\">{} → {} <span class=\"status {}\">{}</span></p>\n",
        escape(if record.primary.is_empty() { "primary" } else { &record.primary }),
        escape(&record.standby),
        if is_good { "good" } else { "bad" },
        escape(&record.state)
    );
    if let Some(end) = &record.end {
        html += &format!("<p class=\"end\">{}</p>\n", escape(end));
    }
    html += "</header>\n";
    let time = |time: Option<f64>| time.map_or("–".to_owned(), units::seconds);
    html + &tables::tiles(&[
        ("guest runs at", guest_at(record).to_owned()),
        ("protected for", time(protected_for(record))),
        ("checkpoints", units::count(record.checkpoints)),
        ("pause, median", time(record.pause_p50_seconds)),
        ("longest pause", time(record.pause_longest_seconds)),
        ("output waits, p99", time(record.output_delay_p99_seconds)),
    ])
}

/// Whether the standby recorded the protection. It measures neither pauses nor output.
fn is_standbys(record: &ProtectionRecord) -> bool {
    record.recorded_by == Some(GuestAt::Standby)
}

/// Time from the first held checkpoint until the contact was lost, or until the end.
fn protected_for(record: &ProtectionRecord) -> Option<f64> {
    let seeded = record.seeding_seconds?;
    let after = |from: f64| {
        record.changes.iter().find(move |change| change.at_seconds > from && change.state != "protected")
    };
    let end = after(seeded).map_or(record.total_seconds, |change| change.at_seconds);
    Some((end - seeded).max(0.0))
}

/// Name and value of each row of the table.
fn rows(record: &ProtectionRecord) -> Vec<(String, String)> {
    let time = |time: Option<f64>| time.map_or("not measured".to_owned(), units::seconds);
    let sizes: Vec<f64> = record.parts.iter().filter_map(|part| size(record, part)).collect();
    let mean = (!sizes.is_empty()).then(|| sizes.iter().sum::<f64>() / sizes.len() as f64);
    let most = |of: fn(&Part) -> Option<f64>| record.parts.iter().filter_map(of).reduce(f64::max);
    let delay = (!is_standbys(record)).then_some(record.checkpoint_delay_seconds);
    let rows = [
        ("state", record.state.clone()),
        ("guest runs at", guest_at(record).to_owned()),
        ("total time", units::seconds(record.total_seconds)),
        ("seeding", record.seeding_seconds.map_or("not finished".to_owned(), units::seconds)),
        ("recorded by", if is_standbys(record) { "the standby" } else { "the primary" }.to_owned()),
        ("interval of checkpoints, as set", time(delay)),
        ("checkpoints that the standby held", units::count(record.checkpoints)),
        ("pause, p50", time(record.pause_p50_seconds)),
        ("pause, p99", time(record.pause_p99_seconds)),
        ("pause, longest measured", time(record.pause_longest_seconds)),
        ("age of the checkpoint, greatest", time(most(|part| part.age_seconds))),
        (
            "size of a checkpoint, mean",
            mean.map_or("not measured".to_owned(), |size| units::bytes(size as u64)),
        ),
        ("output waited, p50", time(record.output_delay_p50_seconds)),
        ("output waited, p99", time(record.output_delay_p99_seconds)),
        ("output sent", format!("{} pieces", units::count(record.output_released))),
        ("output dropped", format!("{} pieces", units::count(record.output_dropped))),
        ("sent to the standby", units::bytes(record.transferred_bytes)),
    ];
    rows.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

/// Average bytes of a checkpoint in a part; none during the seeding, and if no checkpoint became held.
fn size(record: &ProtectionRecord, part: &Part) -> Option<f64> {
    let is_seeded = record.seeding_seconds.is_some_and(|seeded| part.at_seconds >= seeded);
    (is_seeded && part.checkpoints > 0).then(|| part.sent_bytes as f64 / part.checkpoints as f64)
}

fn changes(record: &ProtectionRecord) -> String {
    let mut table = Table::new(&["at", "state", "checkpoint", "why"]).with_words(1).with_words(3);
    for change in &record.changes {
        table.row([
            units::seconds(change.at_seconds).as_str(),
            &change.state,
            &units::count(change.checkpoint),
            change.why.as_deref().unwrap_or("–"),
        ]);
    }
    match table.finish() {
        none if none.is_empty() => none,
        table => format!("<section>\n<h2>Changes of the state</h2>\n{table}</section>\n"),
    }
}

/// One chart: title, axis and values.
struct Chart {
    title: &'static str,
    class: &'static str,
    axis: Axis,
    values: Vec<Option<f64>>,
}

impl Chart {
    /// Whether any value is above 0.
    fn has_values(&self) -> bool {
        self.values.iter().flatten().any(|value| *value > 0.0)
    }
}

fn charts(record: &ProtectionRecord) -> Vec<Chart> {
    type Value<'a> = &'a dyn Fn(&Part) -> Option<f64>;
    let values = |of: Value<'_>| -> Vec<Option<f64>> { record.parts.iter().map(of).collect() };
    let most = |values: &[Option<f64>]| values.iter().flatten().copied().fold(0.0, f64::max);
    let times = |title, class, of: Value<'_>| {
        let values = values(of);
        Chart { title, class, axis: Axis::durations(most(&values)), values }
    };
    let bytes = |title, class, per, of: Value<'_>| {
        let values = values(of);
        Chart { title, class, axis: Axis::bytes(most(&values), per), values }
    };
    vec![
        times("Pause for a checkpoint, longest measured", "dirty", &|part| part.pause_seconds),
        times("Age of the checkpoint that the standby holds", "sent-line", &|part| part.age_seconds),
        bytes("Size of a checkpoint", "left-line", "", &|part| size(record, part)),
        bytes("Sent to the standby", "sent-line", "/s", &|part| {
            (part.took_seconds > 0.0).then(|| part.sent_bytes as f64 / part.took_seconds)
        }),
        times("Wait of sent output, longest measured", "dirty", &|part| part.output_delay_seconds),
        bytes("Waiting output, largest measured", "left-line", "", &|part| Some(part.waiting_bytes as f64)),
    ]
}

fn course(record: &ProtectionRecord) -> String {
    if record.parts.is_empty() {
        return "<p>The record contains no measurement of the protection.</p>\n".to_owned();
    }
    let (charts, empty): (Vec<_>, Vec<_>) = charts(record).into_iter().partition(Chart::has_values);
    let time = Axis::time(record.parts.iter().map(end).fold(record.total_seconds, f64::max));
    let top = |index: usize| BANDS_TOP + BAND + GAP + index as f64 * (CHART + GAP);
    let bottom = top(charts.len()) - GAP;
    let mut svg = Svg::new(WIDTH, bottom + FOOT, "States, pauses, ages, sizes and output over time");
    bands(&mut svg, record, &time, bottom);
    for (index, chart) in charts.iter().enumerate() {
        let top = top(index);
        layout::left_axis(&mut svg, &chart.axis, (top, CHART));
        layout::title(&mut svg, top, chart.title);
        let value = |(part, value): (&Part, &Option<f64>)| {
            let y = value.map(|value| top + CHART * (1.0 - chart.axis.at(value)));
            (x(&time, part.at_seconds), x(&time, end(part)), y)
        };
        layout::steps(&mut svg, chart.class, record.parts.iter().zip(&chart.values).map(value));
    }
    for part in &record.parts {
        let (left, right) = (x(&time, part.at_seconds), x(&time, end(part)));
        svg.rect("hit", left, top(0), right - left, bottom - top(0), &tip(record, part));
    }
    layout::time_axis(&mut svg, &time, bottom, "time since the seeding began");
    let mut shown: Vec<_> = [("odd", "seeding"), ("follow", "protected"), ("last", "another state")]
        .into_iter()
        .filter(|(class, _)| record.changes.iter().any(|change| state_class(&change.state) == *class))
        .map(|(class, words)| (class, words.to_owned()))
        .collect();
    let lost: u64 = record.parts.iter().map(|part| part.dropped).sum();
    shown.extend((lost > 0).then(|| ("drop", format!("output was dropped ({} pieces)", units::count(lost)))));
    let has_asked = record.changes.iter().any(|change| is_out(&change.state));
    shown.extend(has_asked.then(|| ("outage", "no contact with the standby".to_owned())));
    let mut html = keys(shown) + &svg.finish();
    if !empty.is_empty() {
        let names: Vec<_> = empty.iter().map(|chart| chart.title).collect();
        html += &format!(
            "<p class=\"name\">Not drawn, because the record has no values: {}.</p>\n",
            names.join("; ")
        );
    }
    html
}

/// The style class of a state.
fn state_class(state: &str) -> &'static str {
    match state {
        "seeding" => "odd",
        "protected" => "follow",
        _ => "last",
    }
}

fn end(part: &Part) -> f64 {
    part.at_seconds + part.took_seconds
}

/// Whether the primary has no contact in this state, so that the arbiter decides.
fn is_out(state: &str) -> bool {
    state.starts_with("asking")
}

fn bands(svg: &mut Svg, record: &ProtectionRecord, time: &Axis, bottom: f64) {
    svg.text("title", LEFT, BANDS_TOP - 12.0, "State");
    let ends = record.changes.iter().skip(1).map(|change| change.at_seconds).chain([record.total_seconds]);
    for (index, (change, to)) in record.changes.iter().zip(ends).enumerate() {
        let (left, right) = (x(time, change.at_seconds), x(time, to));
        let tip = format!(
            "{} from {} to {}\ncheckpoint {}{}",
            change.state,
            units::seconds(change.at_seconds),
            units::seconds(to),
            units::count(change.checkpoint),
            change.why.as_ref().map_or(String::new(), |why| format!("\n{why}"))
        );
        let class = format!("state {}", state_class(&change.state));
        svg.rect(&class, left, BANDS_TOP, (right - left).max(2.0), BAND, &tip);
        if right - left > 14.0 * change.state.len() as f64 {
            svg.text("band-label", (left + right) / 2.0, BANDS_TOP + BAND / 2.0 + 5.0, &change.state);
        }
        if is_out(&change.state) {
            svg.rect(
                "outage",
                left,
                BANDS_TOP + BAND,
                (right - left).max(2.0),
                bottom - BANDS_TOP - BAND,
                &tip,
            );
        } else if index > 0 {
            svg.line("round-edge", left, BANDS_TOP + BAND, left.min(RIGHT), bottom);
        }
    }
    for part in record.parts.iter().filter(|part| part.dropped > 0) {
        let (left, right) = (x(time, part.at_seconds), x(time, end(part)));
        let tip = format!("{} pieces of output were dropped", units::count(part.dropped));
        svg.rect("drop", left, bottom - 5.0, (right - left).max(2.0), 5.0, &tip);
    }
}

fn tip(record: &ProtectionRecord, part: &Part) -> String {
    let time = |time: Option<f64>| time.map_or("–".to_owned(), units::seconds);
    format!(
        "{} to {}\n{} checkpoints, {} each\npause {}, age {}\noutput waited {}, {} still waits\nsent {}",
        units::seconds(part.at_seconds),
        units::seconds(end(part)),
        units::count(part.checkpoints),
        size(record, part).map_or("–".to_owned(), |size| units::bytes(size as u64)),
        time(part.pause_seconds),
        time(part.age_seconds),
        time(part.output_delay_seconds),
        units::bytes(part.waiting_bytes),
        units::bytes(part.sent_bytes)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    #[test]
    fn page_shows_who_won_each_state_and_each_figure() {
        let page = page(&samples::protection_record());

        for words in [
            "the claim is won: the guest continues to run here",
            "<div class=\"value\">primary</div><div class=\"name\">guest runs at</div>",
            "<div class=\"value\">55.0 s</div><div class=\"name\">protected for</div>",
            "<div class=\"value\">1\u{202f}060</div><div class=\"name\">checkpoints</div>",
            "<div class=\"value\">6.10 ms</div><div class=\"name\">longest pause</div>",
            "<tr><th>size of a checkpoint, mean</th><td>1.50 MiB</td></tr>",
            "<tr><th>age of the checkpoint, greatest</th><td>4.90 s</td></tr>",
            "<tr><th>output waited, p50</th><td>28.0 ms</td></tr>",
            "output was dropped (50 pieces)",
        ] {
            assert!(page.contains(words), "{words} is not in {page}");
        }
        assert!(samples::cells(&page).contains("|57.0 s|asking the arbiter|1\u{202f}060|no echo for 2 s|"));
        assert_eq!(page.matches("<rect class=\"state ").count(), 4);
        assert_eq!(page.matches("<rect class=\"outage\"").count(), 1);
        assert_eq!(page.matches("<rect class=\"drop\"").count(), 50);
        for foreign in ["http:", "https:", "src=", "href=", "url(", "<script"] {
            assert!(!page.contains(foreign), "{foreign}");
        }
    }

    /// During the seeding there is no pause and no age. The chart has a gap there, not 0.
    #[test]
    fn course_has_gaps_where_nothing_was_seen_and_axes_at_each_chart() {
        let record = samples::protection_record();

        let html = course(&record);

        let pause = html.split("<path class=\"dirty\" d=\"M").nth(1).expect("the pauses");
        let first: f64 = pause.split(' ').next().unwrap().parse().unwrap();
        let seeded = x(&Axis::time(60.0), 2.0);
        assert!((first - seeded).abs() < 0.01, "{first} for {seeded}");
        assert!(
            html.matches("class=\"y-label\"").count() >= 6 * 2
                && html.contains("time since the seeding began")
        );
    }

    #[test]
    fn chart_of_nothing_is_named_and_not_drawn() {
        let mut record = samples::protection_record();
        record.parts.iter_mut().for_each(|part| (part.output_delay_seconds, part.waiting_bytes) = (None, 0));

        let html = course(&record);

        assert!(
            html.contains("has no values: Wait of sent output, longest measured; Waiting output"),
            "{html}"
        );
        assert_eq!(html.matches("class=\"title\"").count(), 1 + 4);
    }

    #[test]
    fn page_of_a_standby_names_the_recorder_and_what_it_does_not_know() {
        let mut record = samples::protection_record();
        (record.recorded_by, record.checkpoint_delay_seconds) = (Some(GuestAt::Standby), 0.0);
        record.primary.clear();

        let page = page(&record);

        assert!(page.contains("<tr><th>recorded by</th><td>the standby</td></tr>"), "{page}");
        assert!(
            page.contains("<tr><th>interval of checkpoints, as set</th><td>not measured</td></tr>"),
            "{page}"
        );
        assert!(page.contains("primary → tcp:b:4444"), "{page}");
    }

    #[test]
    fn page_of_nothing_is_still_a_page_and_escapes() {
        let record = ProtectionRecord { state: "<b>".into(), ..ProtectionRecord::new("<i>", "b", 0.0) };

        let page = page(&record);

        assert!(page.ends_with("</html>\n") && !page.contains("<b>") && !page.contains("<i>"));
        assert!(page.contains("not decided") && !page.contains("NaN") && !page.contains("inf"), "{page}");
    }
}
