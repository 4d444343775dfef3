//! The state of a relay, from its `query-relay`.

use serde_json::Value;

use crate::units;

/// The text for the answer, or JSON.
pub(super) fn text(relay: &Value, is_json: bool) -> String {
    if is_json {
        let mut relay = relay.clone();
        if let Some(members) = relay.as_object_mut() {
            members.insert("schema".into(), "sterna-relay-info".into());
            members.insert("version".into(), 1.into());
        }
        return format!("{relay:#}\n");
    }
    let mut text = String::new();
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    let listening = relay["listening"].as_array().map_or(&[][..], Vec::as_slice);
    let listening: Vec<&str> = listening.iter().filter_map(Value::as_str).collect();
    row("relay", format!("listens at {}", listening.join(", ")));
    row(
        "limit",
        match relay["limit"].as_u64() {
            None | Some(0) => "none".to_owned(),
            Some(limit) => units::rate(limit as f64),
        },
    );
    if relay["ending"] == true {
        row("ending", "begins no more sessions".to_owned());
    }
    let sessions = relay["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    row("sessions", sessions.len().to_string());
    for session in sessions {
        text += &one(session);
    }
    text
}

fn one(session: &Value) -> String {
    let word = |name: &str| session[name].as_str().unwrap_or_default().to_owned();
    let count = |name: &str| session[name].as_u64().unwrap_or(0);
    let size = |name: &str| session[name].as_u64().map_or_else(|| "unknown".to_owned(), units::bytes);
    let rate =
        |name: &str| session[name].as_u64().map_or_else(|| "unknown".to_owned(), |it| units::rate(it as f64));
    let mut text = String::from("\n");
    let mut row = |name: &str, value: String| text += &format!("{name:<12} {value}\n");
    row("session", format!("{}, route {}, relay of the {}", word("session"), word("route"), word("role")));
    row(
        "state",
        match (word("status").as_str(), session["lost-for"].as_f64()) {
            ("waiting", _) => {
                "waiting for the other relay: the destination may have the guest, look there".to_owned()
            }
            (_, Some(lost)) => format!("no connection to the other relay for {}", units::seconds(lost)),
            (status, None) => format!("{status}, {} connections to {}", count("carriers"), word("peer")),
        },
    );
    let round = if count("round") > 0 { format!(", round {}", count("round")) } else { String::new() };
    row("phase", format!("{}{round}", word("phase")));
    row(
        "passed",
        format!(
            "{} of {} RAM, {} remaining",
            size("processed-bytes"),
            size("total-bytes"),
            size("remaining-bytes")
        ),
    );
    row("rate", format!("{}, dirty rate {}", rate("rate"), rate("dirty-rate")));
    if let Some(downtime) = session["downtime"].as_f64() {
        let so_far = if session["downtime-over"] == true { "" } else { " so far" };
        row("downtime", format!("{}{so_far}", units::seconds(downtime)));
    }
    row("compression", format!("{:.2} to 1", session["compression-ratio"].as_f64().unwrap_or(1.0)));
    row(
        "lost",
        format!(
            "{} connections, {} replaced, {} sent again",
            count("lost-carriers"),
            count("reconnections"),
            units::bytes(count("resent-bytes"))
        ),
    );
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn text_names_each_session_and_what_it_waits_for() {
        let relay = json!({"listening": ["unix:/a"], "limit": 1 << 20, "ending": true, "sessions": [{
            "session": "00ff", "route": "web1", "role": "source", "status": "running", "phase": "ram", "round": 2,
            "peer": "tcp:h:1", "carriers": 2, "total-bytes": 1 << 30, "processed-bytes": 1 << 29, "rate": 1 << 20,
            "compression-ratio": 1.0, "lost-carriers": 3, "reconnections": 3, "resent-bytes": 4096, "downtime": 0.05,
        }]});

        let text = text(&relay, false);

        for row in [
            "relay        listens at unix:/a\n",
            "limit        1.00 MiB/s\n",
            "session      00ff, route web1, relay of the source\n",
            "state        running, 2 connections to tcp:h:1\n",
            "phase        ram, round 2\n",
            "passed       512 MiB of 1.00 GiB RAM, unknown remaining\n",
            "downtime     50.0 ms so far\n",
            "lost         3 connections, 3 replaced, 4.00 KiB sent again\n",
        ] {
            assert!(text.contains(row), "{row} is not in {text}");
        }
        assert!(super::text(&relay, true).contains("\"schema\": \"sterna-relay-info\""));
    }
}
