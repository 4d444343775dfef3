//! Tests with a real etcd as the arbiter of claims.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::time::Duration;

use serde_json::json;
use sterna_arbiter::{Arbiter, Claim, Claimant, Generation, GuestName, Identity, Role, Ruling, Spec};
use sterna_interop::{Etcd, Failure};

use crate::certificates::{Authority, Wanted, directory_of};

const LIMIT: Duration = Duration::from_secs(60);
/// Time limit of a request to a cluster that cannot decide.
const SHORT: Duration = Duration::from_secs(3);
const RACES: u64 = 200;

fn claim(process: &str, generation: u64) -> Claim {
    Claim {
        guest: GuestName::new("a guest").expect("a name"),
        generation: Generation::new(generation),
        claimant: Claimant::new(Role::Standby, process).expect("a name"),
    }
}

fn lost(winner: &str) -> Ruling {
    Ruling::Lost { winner: Some(claim(winner, 1).claimant) }
}

fn arbiter(spec: &str, limit: Duration) -> Arc<dyn Arbiter> {
    spec.parse::<Spec>().and_then(|spec| spec.open(limit)).expect("an arbiter").arbiter
}

#[test]
fn etcd_gives_each_generation_to_the_first() -> Result<(), Failure> {
    let Some(mut etcd) = Etcd::start_for("etcd_gives_each_generation_to_the_first", 1, None)? else {
        return Ok(());
    };
    let spec = format!("etcd:{}", etcd.url(0));
    let rulings = |name: &str, barrier: &Barrier| -> Vec<Ruling> {
        let arbiter = arbiter(&spec, LIMIT);
        let rule = |generation| {
            barrier.wait();
            arbiter.claim(&claim(name, generation)).expect("a ruling")
        };
        (0..RACES).map(rule).collect()
    };

    let barrier = Barrier::new(2);
    let (a, b) = std::thread::scope(|scope| {
        let a = scope.spawn(|| rulings("a", &barrier));
        (rulings("b", &barrier), a.join().expect("no panic"))
    });
    let rulings: Vec<_> = a.into_iter().zip(b).collect();
    for pair in &rulings {
        assert!(*pair == (Ruling::Won, lost("b")) || *pair == (lost("a"), Ruling::Won), "{pair:?}");
    }

    // Requests fail while the member is down. After its restart, it gives the same rulings as before.
    etcd.kill(0);
    let late = arbiter(&spec, LIMIT);
    let error = late.claim(&claim("c", 0)).expect_err("it is gone");
    assert!(!error.is_contradictory() && error.to_string().contains("refused"), "{error}");
    etcd.start_again(0)?;
    for (generation, (b, a)) in (0..).zip(rulings) {
        assert_eq!(late.claim(&claim("b", generation)), Ok(b));
        assert_eq!(late.claim(&claim("a", generation)), Ok(a));
    }
    Ok(())
}

#[test]
fn etcd_value_that_is_no_claim_is_believed_by_nobody() -> Result<(), Failure> {
    let name = "etcd_value_that_is_no_claim_is_believed_by_nobody";
    let Some(etcd) = Etcd::start_for(name, 1, None)? else { return Ok(()) };
    let arbiter = arbiter(&format!("etcd:{},prefix=p/", etcd.url(0)), LIMIT);
    // The keys are `p/a%20guest/1` with the value "hello", and `p/a%20guest/2` without a value.
    etcd.post("/v3/kv/put", &json!({"key": "cC9hJTIwZ3Vlc3QvMQ==", "value": "aGVsbG8="}).to_string())?;
    etcd.post("/v3/kv/put", &json!({"key": "cC9hJTIwZ3Vlc3QvMg=="}).to_string())?;

    for (generation, what) in [(1, "not a claim of Sterna"), (2, "empty")] {
        let error = arbiter.claim(&claim("a", generation)).expect_err("must not start on either side");
        assert!(error.is_contradictory() && error.to_string().contains(what), "{error}");
    }
    assert_eq!(arbiter.claim(&claim("a", 3)), Ok(Ruling::Won));
    Ok(())
}

#[test]
fn etcd_rules_as_long_as_a_majority_lives() -> Result<(), Failure> {
    let Some(mut etcd) = Etcd::start_for("etcd_rules_as_long_as_a_majority_lives", 3, None)? else {
        return Ok(());
    };
    let spec = format!("etcd:{},{},{}", etcd.url(0), etcd.url(1), etcd.url(2));
    let patient = arbiter(&spec, LIMIT);
    let identity = patient.identity(&claim("a", 1).guest, Generation::new(1));
    assert!(matches!(&identity, Ok(Identity::Is(_))), "{identity:?}");
    assert_eq!(patient.claim(&claim("a", 1)), Ok(Ruling::Won));

    etcd.kill(0);
    // There may be no ruling while a new leader is elected.
    let won = (0..20).find_map(|_| patient.claim(&claim("a", 2)).ok());
    assert_eq!(won, Some(Ruling::Won));
    assert_eq!(patient.claim(&claim("b", 2)), Ok(lost("a")));

    etcd.kill(1);
    let error = arbiter(&spec, SHORT).claim(&claim("b", 3)).expect_err("no majority");
    assert!(!error.is_contradictory(), "{error}");

    etcd.start_again(1)?;
    assert_eq!(patient.claim(&claim("b", 1)), Ok(lost("a")));
    assert_eq!(
        arbiter(&format!("etcd:{}", etcd.url(1)), LIMIT).identity(&claim("a", 1).guest, Generation::new(1)),
        identity
    );
    Ok(())
}

/// Creates the users `claimant`, who may read and write claims, and `stranger`, who may not. The password of
/// each is its name.
fn demand_users(etcd: &Etcd) -> Result<(), Failure> {
    let range = json!({"permType": 2, "key": "c3Rlcm5hL2NsYWltcy8=", "range_end": "c3Rlcm5hL2NsYWltczA="});
    for (path, body) in [
        ("user/add", json!({"name": "root", "password": "root"})),
        ("role/add", json!({"name": "root"})),
        ("user/grant", json!({"user": "root", "role": "root"})),
        ("role/add", json!({"name": "claims"})),
        ("role/grant", json!({"name": "claims", "perm": range})),
        ("user/add", json!({"name": "claimant", "password": "claimant"})),
        ("user/grant", json!({"user": "claimant", "role": "claims"})),
        ("user/add", json!({"name": "stranger", "password": "stranger"})),
        ("enable", json!({})),
    ] {
        etcd.post(&format!("/v3/auth/{path}"), &body.to_string())?;
    }
    Ok(())
}

/// Certificates for etcd, for its gateway (a client of etcd), and for the test.
fn certificates() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    let authority = Authority::new("Test authority");
    authority.write(directory.path());
    authority.issue(directory.path(), &Wanted::default());
    authority.issue(directory.path(), &Wanted { name: "gateway", is_server: false, ..Wanted::default() });
    for file in ["cert.pem", "key.pem"] {
        let file = |who: &str| directory.path().join(format!("{who}-{file}"));
        std::fs::rename(file("client"), file("gateway")).expect("renamed");
    }
    // With users, etcd's gateway refuses clients whose certificate has a common name.
    authority.issue(directory.path(), &Wanted { name: "", is_server: false, ..Wanted::default() });
    directory
}

#[test]
fn etcd_with_tls_and_users_takes_only_its_own() -> Result<(), Failure> {
    let (ours, foreign) = (certificates(), directory_of("Other authority"));
    let name = "etcd_with_tls_and_users_takes_only_its_own";
    let Some(etcd) = Etcd::start_for(name, 1, Some(ours.path()))? else { return Ok(()) };
    demand_users(&etcd)?;
    let password = |user: &str| {
        let file = ours.path().join(user);
        std::fs::write(&file, user).expect("written");
        file.display().to_string()
    };
    let identity = |directory: &Path| {
        let file = |name: &str| directory.join(name).display().to_string();
        format!("cert={},key={}", file("client-cert.pem"), file("client-key.pem"))
    };
    let with_a_name = identity(ours.path()).replace("client-", "gateway-");
    let ca = |directory: &Path| format!("ca={}", directory.join("ca-cert.pem").display());
    let user = |name: &str, file: &str| format!("user={name},password-file={file}");
    let (good_ca, good_identity) = (ca(ours.path()), identity(ours.path()));
    let good_user = user("claimant", &password("claimant"));
    let asked = |parts: &[&str]| {
        arbiter(&format!("etcd:{},{}", etcd.tls_url(0), parts.join(",")), LIMIT).claim(&claim("a", 1))
    };

    for (parts, what) in [
        (vec![&good_ca, &good_identity], "user name is empty"),
        (vec![&good_ca, &good_identity, &user("stranger", &password("stranger"))], "permission denied"),
        (vec![&good_ca, &good_identity, &user("claimant", &password("wrong"))], "authentication failed"),
        (vec![&good_ca, &with_a_name, &good_user], "CommonName"),
        (vec![&good_ca, &good_user], "ertificate"),
        (vec![&good_ca, &identity(foreign.path()), &good_user], "ertificate"),
        (vec![&ca(foreign.path()), &good_identity, &good_user], "ertificate"),
    ] {
        let parts: Vec<&str> = parts.into_iter().map(String::as_str).collect();
        let error = asked(&parts).expect_err(what);
        assert!(!error.is_contradictory() && error.to_string().contains(what), "{what}: {error}");
    }
    assert_eq!(asked(&[&good_ca, &good_identity, &good_user]), Ok(Ruling::Won));
    assert_eq!(asked(&[&good_ca, &good_identity, &good_user]), Ok(Ruling::Won));
    Ok(())
}
