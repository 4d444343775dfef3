//! TLS with real QEMU, which uses GnuTLS. Sterna's channels are the server of a QEMU source and the client of
//! a QEMU destination, in complete migrations.
//!
//! Most tests put a relay of Sterna's channels between two QEMUs. The relay ends the TLS connection of one
//! side and starts another to the other side. Every byte of the migration therefore passes Sterna's TLS
//! twice, once in each role, unchanged.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::certificates::{Authority, Wanted, good_directory};
use serde_json::json;
use sterna_interop::{Failure, Guest, Qemu, Root, unbroken};
use sterna_transport::{
    Address, CancelFlag, Channel, Listener, Tls, TlsCredentials, TlsEndpoint, TransportError,
};

const LIMIT: Duration = Duration::from_secs(60);

fn tls(directory: &Path, endpoint: TlsEndpoint) -> Tls {
    Tls::new(Arc::new(TlsCredentials::from_directory(directory, endpoint, true).expect("credentials")))
}

fn credentials(directory: &Path, endpoint: &str, more: &str) -> String {
    format!("tls-creds-x509,id=tls0,dir={},endpoint={endpoint},verify-peer=on{more}", directory.display())
}

/// Accepts `count` connections of a QEMU source and forwards each to `to`. The order is the order of their
/// arrival.
fn relay(
    listener: &Listener,
    to: &Address,
    tls: (&Tls, &Tls),
    count: usize,
) -> Result<Vec<String>, TransportError> {
    let flag = CancelFlag::new();
    let mut names = Vec::new();
    let mut pairs = Vec::new();
    std::thread::scope(|scope| {
        for _ in 0..count {
            let from = listener.accept(Some(LIMIT), &flag)?;
            from.start_tls(tls.0, TlsEndpoint::Server, None, LIMIT, &flag)?;
            names.push(from.tls_peer().unwrap_or("nobody").to_owned());
            let onward = Channel::connect_with(to, Some(tls.1), LIMIT, &flag, Arc::new)?;
            let from = Arc::new(from);
            pairs.push((Arc::clone(&from), Arc::clone(&onward)));
            for (one, other) in [(Arc::clone(&from), Arc::clone(&onward)), (onward, from)] {
                scope.spawn(move || pump(&one, &other));
            }
        }
        Ok(names)
    })
}

fn pump(from: &Channel, to: &Channel) {
    let mut buffer = vec![0; 256 * 1024];
    while let Ok(count @ 1..) = from.read_some(&mut buffer) {
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    // The other side may have closed already.
    let _ = to.finish_writing();
}

struct Case<'a> {
    name: &'a str,
    channels: u8,
    capabilities: &'a [&'a str],
    parameters: serde_json::Value,
    priority: &'a str,
    machine: &'a str,
}

impl Default for Case<'_> {
    fn default() -> Self {
        Case { name: "", channels: 0, capabilities: &[], parameters: json!({}), priority: "", machine: "pc" }
    }
}

/// A complete migration from QEMU to QEMU through Sterna's TLS, in both directions.
fn carried(case: &Case<'_>, directory: &Path) -> Result<(), Failure> {
    let Some(root) = Root::qemu_for(case.name) else { return Ok(()) };
    let builder = Qemu::builder(&root).machine(case.machine).guest(Guest::Boot);
    let with = |endpoint| credentials(directory, endpoint, case.priority);
    let mut source = builder.clone().args(&["-object", &with("client")]).spawn()?;
    let mut target = builder.incoming_defer().args(&["-object", &with("server")]).spawn()?;
    source.wait_for_ticks(3)?;
    for qemu in [&mut source, &mut target] {
        qemu.capabilities(case.capabilities)?;
        qemu.parameters(case.parameters.clone())?;
        qemu.parameters(json!({"tls-creds": "tls0", "tls-hostname": "localhost"}))?;
        qemu.parameters(json!({"downtime-limit": 10_000}))?;
        if case.channels > 0 {
            qemu.capabilities(&["multifd"])?;
            qemu.parameters(json!({"multifd-channels": case.channels}))?;
        }
    }
    let to: Address = format!("tcp:127.0.0.1:{}", target.listen_on_tcp()?).parse().expect("an address");
    let listener =
        Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).map_err(|e| e.to_string())?;
    let (server, client) = (tls(directory, TlsEndpoint::Server), tls(directory, TlsEndpoint::Client));

    let names = std::thread::scope(|scope| {
        let (listener, to) = (&listener, &to);
        let (server, client) = (&server, &client);
        let count = usize::from(case.channels) + 1;
        let relaying = scope.spawn(move || relay(listener, to, (server, client), count));
        source.migrate(&listener.local_address().to_string())?;
        target.wait_for_migration()?;
        relaying.join().expect("no panic").map_err(|error| format!("{error}; {}", source.log()))
    })?;

    target.wait_for_ticks(3)?;
    unbroken(&[&source, &target])?;
    assert_eq!(names, vec!["C=GB,O=Example,CN=client"; usize::from(case.channels) + 1]);
    Ok(())
}

#[test]
fn qemu_tls_main_channel_is_carried_both_ways() -> Result<(), Failure> {
    let case = Case { name: "qemu_tls_main_channel_is_carried_both_ways", ..Case::default() };
    carried(&case, good_directory().path())
}

#[test]
fn qemu_tls_multifd_and_return_path_are_carried_both_ways() -> Result<(), Failure> {
    let case = Case {
        name: "qemu_tls_multifd_and_return_path_are_carried_both_ways",
        channels: 4,
        capabilities: &["return-path"],
        ..Case::default()
    };
    carried(&case, good_directory().path())
}

#[test]
fn qemu_tls_of_version_1_2_with_rsa_is_carried_both_ways() -> Result<(), Failure> {
    let directory = tempfile::tempdir().expect("a directory");
    let authority = Authority::rsa("RSA authority");
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted { is_rsa: true, ..Wanted::default() });
    let client = Wanted { name: "client", is_server: false, is_rsa: true, ..Wanted::default() };
    authority.issue(directory.path(), &client);
    let case = Case {
        name: "qemu_tls_of_version_1_2_with_rsa_is_carried_both_ways",
        channels: 2,
        capabilities: &["return-path"],
        priority: ",priority=NORMAL:-VERS-TLS1.3",
        ..Case::default()
    };
    carried(&case, directory.path())
}

#[test]
fn qemu_tls_compressed_multifd_of_an_old_machine_is_carried_both_ways() -> Result<(), Failure> {
    let case = Case {
        name: "qemu_tls_compressed_multifd_of_an_old_machine_is_carried_both_ways",
        channels: 1,
        parameters: json!({"multifd-compression": "zstd"}),
        machine: "pc-q35-9.2",
        ..Case::default()
    };
    carried(&case, good_directory().path())
}

/// The error of Sterna's server for a QEMU source. The source has the client's files in `theirs`.
fn refusal_of_source(name: &str, ours: &Path, theirs: &Path) -> Result<Option<(String, String)>, Failure> {
    let Some(root) = Root::qemu_for(name) else { return Ok(None) };
    let mut source = Qemu::builder(&root).args(&["-object", &credentials(theirs, "client", "")]).spawn()?;
    // Otherwise, all of the source's data may fit the socket. The source would then complete before it learns
    // of the refusal.
    source.capabilities(&["return-path"])?;
    source.parameters(json!({"tls-creds": "tls0", "tls-hostname": "localhost"}))?;
    let listener =
        Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).map_err(|e| e.to_string())?;
    source.start_migration(&listener.local_address().to_string())?;
    let flag = CancelFlag::new();
    let channel = listener.accept(Some(LIMIT), &flag).map_err(|error| error.to_string())?;
    let refused = channel.start_tls(&tls(ours, TlsEndpoint::Server), TlsEndpoint::Server, None, LIMIT, &flag);
    drop(channel);
    let said = refused.expect_err("it must be refused").to_string();
    let heard = source.wait_for_migration().expect_err("it must fail");
    assert_eq!(source.status()?, "running");
    Ok(Some((said, heard)))
}

#[test]
fn qemu_source_of_another_authority_is_told_apart() -> Result<(), Failure> {
    let (ours, theirs) = (good_directory(), tempfile::tempdir().expect("a directory"));
    let stranger = Authority::new("Stranger");
    stranger.write(theirs.path());
    stranger.issue(theirs.path(), &Wanted { is_server: false, ..Wanted::default() });
    let name = "qemu_source_of_another_authority_is_told_apart";
    let Some((said, heard)) = refusal_of_source(name, ours.path(), theirs.path())? else { return Ok(()) };
    assert!(said.contains("not issued by an authority in ca-cert.pem"), "{said}");
    assert!(heard.contains("certificate") || heard.contains("TLS"), "{heard}");
    Ok(())
}

#[test]
fn qemu_source_without_certificate_is_told_apart() -> Result<(), Failure> {
    let (ours, theirs) = (good_directory(), tempfile::tempdir().expect("a directory"));
    std::fs::copy(ours.path().join("ca-cert.pem"), theirs.path().join("ca-cert.pem")).expect("copied");
    let name = "qemu_source_without_certificate_is_told_apart";
    let Some((said, _)) = refusal_of_source(name, ours.path(), theirs.path())? else { return Ok(()) };
    assert!(said.contains("sent no certificate") && said.contains("client-cert.pem"), "{said}");
    Ok(())
}

#[test]
fn plain_qemu_source_is_told_apart() -> Result<(), Failure> {
    let Some(root) = Root::qemu_for("plain_qemu_source_is_told_apart") else { return Ok(()) };
    let directory = good_directory();
    let mut source = Qemu::builder(&root).spawn()?;
    let listener =
        Listener::bind(&"tcp:127.0.0.1:0".parse().expect("an address")).map_err(|e| e.to_string())?;
    source.start_migration(&listener.local_address().to_string())?;
    let flag = CancelFlag::new();
    let channel = listener.accept(Some(LIMIT), &flag).map_err(|error| error.to_string())?;
    let server = tls(directory.path(), TlsEndpoint::Server);
    let refused = channel.start_tls(&server, TlsEndpoint::Server, None, LIMIT, &flag);
    let said = refused.expect_err("it must be refused").to_string();
    assert!(said.contains("does not use TLS") && said.contains("TLS credentials"), "{said}");
    Ok(())
}

/// Connects to a QEMU destination that verifies clients and allows one name. Returns the result.
fn visit(
    name: &str,
    ours: &Path,
    theirs: &Path,
    allowed: Option<&str>,
) -> Result<Option<Result<(), TransportError>>, Failure> {
    let Some(root) = Root::qemu_for(name) else { return Ok(None) };
    let object = credentials(theirs, "server", "");
    let mut arguments = vec!["-object".to_owned(), object];
    // In QEMU's options, a comma is doubled.
    let identity =
        allowed.map(|allowed| format!("authz-simple,id=who,identity={}", allowed.replace(',', ",,")));
    arguments.extend(identity.into_iter().flat_map(|identity| ["-object".to_owned(), identity]));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let mut target = Qemu::builder(&root).incoming_defer().args(&arguments).spawn()?;
    target.parameters(json!({"tls-creds": "tls0"}))?;
    if allowed.is_some() {
        target.parameters(json!({"tls-authz": "who"}))?;
    }
    let to: Address = format!("tcp:127.0.0.1:{}", target.listen_on_tcp()?).parse().expect("an address");
    let client = tls(ours, TlsEndpoint::Client);
    let channel = match Channel::connect_with(&to, Some(&client), LIMIT, &CancelFlag::new(), Arc::new) {
        Ok(channel) => channel,
        Err(error) => return Ok(Some(Err(error))),
    };
    // A TLS 1.3 client learns the server's verdict on its certificate only with this read. If QEMU accepts
    // the client, it reads the stream and refuses it because of its version.
    channel.set_stall_limit(Some(LIMIT));
    let said = channel.write_all(b"QEVM\0\0\0\x63").and_then(|()| channel.read_exact(&mut [0; 1]));
    // After an accepted client, the migration fails a little later. After a refused one, QEMU keeps waiting.
    let mut is_taken = false;
    for _ in 0..20 {
        let state = target.execute("query-migrate", serde_json::Value::Null)?;
        is_taken |= state["status"] == "failed";
        std::thread::sleep(Duration::from_millis(if is_taken { 0 } else { 50 }));
    }
    drop(channel);
    Ok(Some(if is_taken { Ok(()) } else { said }))
}

#[test]
fn qemu_destination_refuses_a_client_without_certificate() -> Result<(), Failure> {
    let (theirs, ours) = (good_directory(), tempfile::tempdir().expect("a directory"));
    std::fs::copy(theirs.path().join("ca-cert.pem"), ours.path().join("ca-cert.pem")).expect("copied");
    let name = "qemu_destination_refuses_a_client_without_certificate";
    let mut errors = Vec::new();
    for _ in 0..6 {
        let Some(came) = visit(name, ours.path(), theirs.path(), None)? else { return Ok(()) };
        let error = came.expect_err("it must be refused").to_string();
        if error.contains("refused this side's certificate") {
            return Ok(());
        }
        // QEMU sometimes closes before it has sent the reason.
        assert!(error.contains("the peer closed"), "{error}");
        errors.push(error);
    }
    panic!("it never said why: {errors:?}");
}

#[test]
fn qemu_destination_of_another_authority_is_refused() -> Result<(), Failure> {
    let (ours, theirs) = (good_directory(), tempfile::tempdir().expect("a directory"));
    let stranger = Authority::new("Stranger");
    stranger.write(theirs.path());
    stranger.issue(theirs.path(), &Wanted::default());
    let name = "qemu_destination_of_another_authority_is_refused";
    let Some(came) = visit(name, ours.path(), theirs.path(), None)? else { return Ok(()) };
    let error = came.expect_err("it must be refused").to_string();
    assert!(error.contains("not issued by an authority in ca-cert.pem"), "{error}");
    Ok(())
}

#[test]
fn qemu_spells_names_as_sterna_does() -> Result<(), Failure> {
    let directory = good_directory();
    let name = "qemu_spells_names_as_sterna_does";
    for (allowed, is_taken) in [("C=GB,O=Example,CN=client", true), ("CN=client,O=Example,C=GB", false)] {
        let Some(came) = visit(name, directory.path(), directory.path(), Some(allowed))? else {
            return Ok(());
        };
        assert_eq!(came.is_ok(), is_taken, "{allowed}: {came:?}");
    }
    Ok(())
}
