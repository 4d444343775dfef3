//! Test: an error that breaks a session is returned to every thread that uses it.

use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;

use super::credentials::Config;
use super::session::{SessionState, Side};
use super::{TlsCredentials, TlsEndpoint, certificates};

/// A record with a fatal alert: handshake_failure (RFC 8446 §5.1, §6.2).
const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 40];

#[test]
fn alert_that_one_thread_has_met_is_met_by_the_next_too() {
    let directory = certificates::good_directory();
    let credentials = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Client, true);
    let Config::Client(config) = credentials.expect("credentials").config else { panic!("a client") };
    let name = ServerName::try_from("localhost").expect("a name");
    let client = UnbufferedClientConnection::new(config, name).expect("a client");
    let mut state = SessionState::new(Side::Client(Box::new(client)));
    state.hoard().expect("its hello");
    state.put(&ALERT);

    let first = state.hoard().expect_err("the alert");

    assert_eq!(state.hoard(), Err(first));
}
