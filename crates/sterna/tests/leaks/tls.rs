//! A destination that waits for TLS handshakes leaves nothing behind.

use std::net::TcpStream;
use std::sync::Arc;

use crate::certificates::good_directory;
use crate::common::parameters;
use crate::support::{case, port, waiting};
use sterna::{Capabilities, Parameters, Tls, TlsCredentials, TlsEndpoint};

#[test]
fn silent_client_of_a_tls_destination_goes_when_it_is_dropped() {
    let directory = good_directory();
    case("silent", || {
        let credentials = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Server, true);
        let tls = Tls::new(Arc::new(credentials.expect("credentials")));
        let params = Parameters { tls: Some(tls), ..parameters() };
        let (_, incoming) = waiting(&params, Capabilities::default());
        let silent = TcpStream::connect(("127.0.0.1", port(&incoming.address()))).unwrap();
        drop(incoming);
        drop(silent);
    });
}
