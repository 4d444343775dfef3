//! Tests a standby's monitor, with a standby that only records its commands.

use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::{Value, json};
use sterna::{Capabilities, Parameters};
use sterna_qmp::standby::{StandbyControl, StandbyMonitor, StandbyReport, Takeover};
use sterna_qmp::{Client, ClientError, Endpoint, EventBus, Server};
use sterna_standby::{Standby, StandbyOptions};

struct Noted {
    standby: Standby,
    wishes: Mutex<Vec<Takeover>>,
    quits: Mutex<u32>,
}

impl StandbyControl for Noted {
    fn report(&self) -> StandbyReport {
        StandbyReport::of(&self.standby)
    }
    fn take_over(&self, wish: Takeover) -> Result<(), String> {
        self.wishes.lock().push(wish);
        if wish.is_planned { Err("there is no contact".to_owned()) } else { Ok(()) }
    }
    fn quit(&self) {
        *self.quits.lock() += 1;
    }
}

#[test]
fn monitor_of_a_standby_answers_as_a_secondary_and_hands_wishes_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = sterna::Address::Unix(directory.path().join("standby"));
    let standby = Standby::listen(
        &at,
        &StandbyOptions::default(),
        Parameters::default(),
        Capabilities::default(),
        Arc::new(()),
    )
    .expect("listening");
    let noted = Arc::new(Noted { standby, wishes: Mutex::default(), quits: Mutex::default() });
    let endpoint = Endpoint::Unix(directory.path().join("qmp"));
    let server = Server::bind(&endpoint, StandbyMonitor::new(noted.clone()), EventBus::new()).unwrap();
    let mut client = Client::connect(&endpoint, std::time::Duration::from_secs(30)).unwrap();
    let mut ask = |command: &str, arguments: Value| client.execute(command, arguments);

    assert_eq!(ask("query-migrate", Value::Null).unwrap(), json!({}));
    assert_eq!(ask("query-status", Value::Null).unwrap()["status"], "inmigrate");
    let none = json!({"mode": "none", "last-mode": "none", "reason": "none"});
    assert_eq!(ask("query-colo-status", Value::Null).unwrap(), none);
    let protection = ask("x-sterna-query-protection", Value::Null).unwrap();
    assert_eq!((&protection["state"], &protection["contact"]), (&json!("waiting"), &Value::Null));

    ask("x-colo-lost-heartbeat", Value::Null).unwrap();
    ask("x-sterna-takeover", json!({"vouch": true, "image": true})).unwrap();
    let refused = ask("x-sterna-takeover", json!({"planned": true})).expect_err("refused");
    assert!(
        matches!(&refused, ClientError::Refused { desc, .. } if desc == "there is no contact"),
        "{refused}"
    );
    // The command has no argument that forces it.
    assert!(ask("x-colo-lost-heartbeat", json!({"force": true})).is_err());
    ask("quit", Value::Null).unwrap();
    drop(client);
    server.close();

    let wish =
        |is_planned, vouches, into_image| Takeover { is_planned, vouches, into_image, ..Takeover::default() };
    let wishes = [wish(false, false, false), wish(false, true, true), wish(true, false, false)];
    assert_eq!(*noted.wishes.lock(), wishes);
    assert_eq!(*noted.quits.lock(), 1);
}
