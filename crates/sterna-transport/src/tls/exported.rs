//! Test: the channel binding equals the value that rustls's own exporter returns.

use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConnection, ServerConnection};

use super::certificates;
use super::credentials::Config;
use super::exporter::Exporter;
use super::{TlsCredentials, TlsEndpoint};

#[test]
fn binding_is_what_rustls_exports_under_the_label_of_rfc_9266() {
    let directory = certificates::good_directory();
    let server = TlsCredentials::from_directory(directory.path(), TlsEndpoint::Server, true);
    let Config::Server(server) = server.expect("credentials").config else { panic!("a server") };
    // The two hash functions of TLS 1.3's cipher suites.
    for suite in
        [rustls::CipherSuite::TLS13_AES_128_GCM_SHA256, rustls::CipherSuite::TLS13_AES_256_GCM_SHA384]
    {
        let mut provider = super::provider::provider().expect("a provider").as_ref().clone();
        provider.cipher_suites.retain(|known| known.suite() == suite);
        let credentials =
            TlsCredentials::with_ciphers(directory.path(), TlsEndpoint::Client, Arc::new(provider));
        let Config::Client(theirs) = credentials.expect("credentials").config else { panic!("a client") };
        let name = ServerName::try_from("localhost").expect("a name");
        let mut client = ClientConnection::new(theirs, name).expect("client");
        let exporter = Arc::new(Exporter::default());
        let mut ours = server.as_ref().clone();
        ours.key_log = Arc::clone(&exporter) as _;
        let mut server = ServerConnection::new(Arc::new(ours)).expect("server");
        while client.is_handshaking() || server.is_handshaking() {
            carry(|to| client.write_tls(to), |from| server.read_tls(from));
            server.process_new_packets().expect("the client's bytes");
            carry(|to| server.write_tls(to), |from| client.read_tls(from));
            client.process_new_packets().expect("the server's bytes");
        }
        let label = b"EXPORTER-Channel-Binding";
        let expected = client.export_keying_material([0; 32], label, None).expect("exported");
        assert_eq!(exporter.channel_binding(&server), Some(expected), "{suite:?}");
    }
}

fn carry(
    mut write: impl FnMut(&mut Vec<u8>) -> std::io::Result<usize>,
    mut read: impl FnMut(&mut &[u8]) -> std::io::Result<usize>,
) {
    let mut bytes = Vec::new();
    while write(&mut bytes).expect("written") > 0 {}
    let mut rest = &bytes[..];
    while !rest.is_empty() {
        read(&mut rest).expect("read");
    }
}
