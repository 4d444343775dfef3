//! Tests TLS on the monitor: objects, the parameters that refer to them, and a migration with TLS.

use std::path::Path;

use crate::certificates::{Authority, Wanted, good_directory};
use serde_json::{Value, json};
use sterna::{TlsEndpoint, Vm};
use sterna_qmp::Client;

use super::engine::{ReadAll, end_of};
use super::support::{ClientExt, FakeVm, Monitor};

fn credentials(id: &str, directory: &Path, endpoint: &str) -> Value {
    json!({"qom-type": "tls-creds-x509", "id": id, "dir": directory, "endpoint": endpoint, "verify-peer": true})
}

fn set_up(client: &mut Client, directory: &Path, endpoint: &str) {
    client.ok("object-add", credentials("tls0", directory, endpoint));
    client.set("tls-creds", json!("tls0")).unwrap();
}

#[test]
fn guest_moves_over_tls_by_qmp_alone() {
    let directory = good_directory();
    for multifd in [false, true] {
        let (source, mut src) = Monitor::over_the_real_engine(FakeVm::new(true, true), true).client_of();
        let (destination, mut dst) =
            Monitor::over_the_real_engine(FakeVm::new(false, false), true).client_of();
        for (client, endpoint) in [(&mut src, "client"), (&mut dst, "server")] {
            client.capability("events", true).unwrap();
            client.capability("multifd", multifd).unwrap();
            set_up(client, directory.path(), endpoint);
        }
        dst.ok(
            "object-add",
            json!({"qom-type": "authz-list", "id": "who", "policy": "deny", "rules": [
            {"match": "*CN=client", "policy": "allow", "format": "glob"}]}),
        );
        dst.set("tls-authz", json!("who")).unwrap();
        src.set("tls-hostname", json!("localhost")).unwrap();
        dst.ok("migrate-incoming", json!({"uri": "tcp:127.0.0.1:0"}));
        let at = dst.ok("query-migrate", Value::Null)["socket-address"][0]["port"].clone();
        let port = at.as_str().expect("a port");
        source.vm.ram().block(0).write(4096, b"secret").unwrap();

        src.ok("migrate", json!({"uri": format!("tcp:127.0.0.1:{port}")}));

        assert_eq!(end_of(&mut src), "completed", "{}", src.ok("query-migrate", Value::Null));
        assert_eq!(end_of(&mut dst), "completed");
        let ram = destination.vm.ram().block(0).read_all();
        assert_eq!(&ram[4096..4102], b"secret");
    }
}

#[test]
fn migrate_with_names_of_nothing_is_refused_and_says_what_to_do() {
    let directory = good_directory();
    let (monitor, mut client) = Monitor::running().client_of();
    let to = json!({"uri": "tcp:127.0.0.1:1"});

    client.set("tls-creds", json!("tls0")).unwrap();
    let nothing = client.refused("migrate", to.clone());
    client.ok("object-add", credentials("tls0", directory.path(), "server"));
    let other_end = client.refused("migrate", to.clone());
    client.ok("object-del", json!({"id": "tls0"}));
    client.ok("object-add", json!({"qom-type": "authz-simple", "id": "tls0", "identity": "CN=a"}));
    let other_kind = client.refused("migrate", to.clone());
    client.ok("object-del", json!({"id": "tls0"}));
    client.ok("object-add", credentials("tls0", directory.path(), "client"));
    let file = client.refused("migrate", json!({"uri": "file:/nowhere/image"}));
    client.ok("migrate", to);

    assert!(nothing.contains("'tls0'") && nothing.contains("object-add"), "{nothing}");
    assert!(other_end.contains("Expected TLS credentials for a client endpoint"), "{other_end}");
    assert!(other_kind.contains("no TLS credentials"), "{other_kind}");
    assert!(file.contains("TLS"), "{file}");
    let parameters = monitor.engine.outgoing().parameters.lock().unwrap().clone();
    let tls = parameters.tls.expect("it takes TLS along");
    assert_eq!(tls.credentials.endpoint(), TlsEndpoint::Client);
    let frozen = client.set("tls-creds", json!("")).unwrap_err();
    assert!(frozen.contains("cannot change during a migration"), "{frozen}");
}

#[test]
fn incoming_with_names_of_nothing_is_refused() {
    let directory = good_directory();
    let (monitor, mut client) = Monitor::waiting(true).client_of();
    let at = json!({"uri": "tcp:127.0.0.1:0"});

    set_up(&mut client, directory.path(), "client");
    let other_end = client.refused("migrate-incoming", at.clone());
    client.ok("object-del", json!({"id": "tls0"}));
    client.ok("object-add", credentials("tls0", directory.path(), "server"));
    client.set("tls-authz", json!("who")).unwrap();
    let nobody = client.refused("migrate-incoming", at.clone());
    client.ok("object-add", json!({"qom-type": "authz-simple", "id": "who", "identity": "CN=a"}));
    client.ok("migrate-incoming", at);

    assert!(other_end.contains("Expected TLS credentials for a server endpoint"), "{other_end}");
    assert!(nobody.contains("'tls-authz'") && nobody.contains("'who'"), "{nobody}");
    let parameters = monitor.engine.incoming().parameters.lock().unwrap().clone();
    assert!(parameters.tls.expect("TLS").authorization.expect("authorization").allows("CN=a"));
}

#[test]
fn object_add_what_is_wrong_is_named() {
    let directory = good_directory();
    let good = directory.path();
    let empty = tempfile::tempdir().unwrap();
    let (_monitor, mut client) = Monitor::running().client_of();
    let with = |name: &str, value: Value| {
        let mut object = credentials("tls0", good, "client");
        object[name] = value;
        object
    };
    for (object, words) in [
        (with("qom-type", json!("tls-creds-psk")), "tls-creds-x509"),
        (with("qom-type", json!("tls-creds-anon")), "tls-creds-x509"),
        (with("qom-type", json!("authz-pam")), "authz-list"),
        (with("qom-type", json!("iothread")), "invalid object type: iothread"),
        (with("id", json!("0bad")), "identifier"),
        (with("id", json!("a b")), "identifier"),
        (with("dir", json!("/nowhere")), "directory does not exist"),
        (with("dir", json!(empty.path())), "ca-cert.pem"),
        (with("dir", json!(5)), "string"),
        (with("endpoint", json!("both")), "both"),
        (with("verify-peer", json!("on")), "boolean"),
        (with("sanity-check", json!(false)), "sanity-check"),
        (with("priority", json!("NORMAL")), "priority"),
        (with("passwordid", json!("sec0")), "encrypted"),
        (with("identity", json!("CN=a")), "'identity' is unexpected"),
        (with("bogus", json!(1)), "'bogus' is unexpected"),
        (json!({"qom-type": "tls-creds-x509", "id": "x"}), "'dir'"),
        (json!({"qom-type": "authz-simple", "id": "x"}), "'identity' is missing"),
        (json!({"qom-type": "authz-list", "id": "x", "policy": "maybe"}), "maybe"),
        (json!({"qom-type": "authz-list", "id": "x", "rules": 5}), "array"),
        (json!({"qom-type": "authz-list", "id": "x", "rules": [5]}), "rules[0]"),
        (json!({"qom-type": "authz-list", "id": "x", "rules": [{"match": "a"}]}), "'policy' is missing"),
        (
            json!({"qom-type": "authz-list", "id": "x", "rules": [{"match": "a", "policy": "deny", "format": "re"}]}),
            "re",
        ),
    ] {
        let error = client.refused("object-add", object.clone());
        assert!(error.contains(words), "{object}: {error}");
    }
    client.ok("object-add", credentials("tls0", good, "client"));
    let twice = client.refused("object-add", credentials("tls0", good, "client"));
    assert!(twice.contains("'tls0' exists already"), "{twice}");
    client.ok("object-del", json!({"id": "tls0"}));
    let gone = client.refused("object-del", json!({"id": "tls0"}));
    assert!(gone.contains("'tls0' not found"), "{gone}");
}

#[test]
fn object_add_certificates_that_no_peer_would_take_are_refused_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let (authority, stranger) = (Authority::new("One"), Authority::new("Other"));
    let (_monitor, mut client) = Monitor::running().client_of();
    let issue = |authority: &Authority, wanted: Wanted<'_>| authority.issue(directory.path(), &wanted);
    let mut refuse =
        |endpoint: &str| client.refused("object-add", credentials("tls0", directory.path(), endpoint));
    authority.write(directory.path());

    issue(&authority, Wanted { is_expired: true, ..Wanted::default() });
    let expired = refuse("server");
    issue(&stranger, Wanted { is_server: false, ..Wanted::default() });
    let strange = refuse("client");
    issue(&authority, Wanted { is_server: false, ..Wanted::default() });
    std::fs::rename(directory.path().join("client-cert.pem"), directory.path().join("server-cert.pem"))
        .unwrap();
    std::fs::rename(directory.path().join("client-key.pem"), directory.path().join("server-key.pem"))
        .unwrap();
    let purpose = refuse("server");
    issue(&authority, Wanted::default());
    std::fs::copy(directory.path().join("server-key.pem"), directory.path().join("kept")).unwrap();
    issue(&authority, Wanted::default());
    std::fs::rename(directory.path().join("kept"), directory.path().join("server-key.pem")).unwrap();
    let key = refuse("server");
    std::fs::write(directory.path().join("server-key.pem"), "no key").unwrap();
    let broken = refuse("server");
    std::fs::remove_file(directory.path().join("server-key.pem")).unwrap();
    let alone = refuse("server");

    assert!(expired.contains("server-cert.pem") && expired.contains("expired"), "{expired}");
    assert!(strange.contains("not issued by an authority in ca-cert.pem"), "{strange}");
    assert!(purpose.contains("tls_www_server"), "{purpose}");
    assert!(key.contains("server-key.pem") && key.contains("does not belong to the certificate"), "{key}");
    assert!(broken.contains("PEM key cannot be read"), "{broken}");
    assert!(alone.contains("need each other"), "{alone}");
}

#[test]
fn object_commands_of_the_human_monitor_do_the_same() {
    let directory = good_directory();
    let (monitor, mut client) = Monitor::running().client_of();
    let line = format!(
        "object_add tls-creds-x509,id=tls0,endpoint=client,verify-peer=on,dir={}",
        directory.path().display()
    );

    assert_eq!(client.human(&line).unwrap(), "");
    assert_eq!(client.human("object_add authz-simple,id=who,identity=CN=a,,O=b").unwrap(), "");
    assert_eq!(client.human("migrate_set_parameter tls-creds tls0").unwrap(), "");
    assert!(client.human("object_add tls-creds-x509,id").unwrap().starts_with("Error: "));
    assert!(client.human("object_del nothing").unwrap().starts_with("Error: "));
    assert_eq!(client.human("migrate -d tcp:127.0.0.1:1").unwrap(), "");

    assert!(monitor.engine.outgoing().parameters.lock().unwrap().tls.is_some());
    assert_eq!(client.human("object_del tls0").unwrap(), "");
}
