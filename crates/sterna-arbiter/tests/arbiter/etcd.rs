//! `etcd:` against servers that work, fail or lie. `interop/tests/interop/etcd.rs` uses a real etcd.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use sterna_arbiter::{Arbiter, ClaimError, Ruling};

use crate::fake::{Reply, Server, Store};
use crate::{PATIENCE, claim, lost, open};

/// Time limit for servers that do not answer.
const SHORT: Duration = Duration::from_millis(300);

fn arbiter(servers: &[&Server], limit: Duration) -> Arc<dyn Arbiter> {
    let urls: Vec<String> = servers.iter().map(|server| server.url()).collect();
    open(&format!("etcd:{}", urls.join(",")), limit).arbiter
}

fn etcd(store: &Store) -> Server {
    let store = store.clone();
    Server::start(move |request| Reply::Http(200, store.txn(&request.body)))
}

fn answering(reply: Reply) -> Server {
    Server::start(move |_| reply.clone())
}

fn no_ruling(server: &Server, limit: Duration) -> ClaimError {
    arbiter(&[server], limit).claim(&claim("a", 1)).expect_err("no ruling")
}

#[test]
fn first_wins_for_ever_in_its_generation() {
    let server = etcd(&Store::default());
    for _ in 0..3 {
        assert_eq!(arbiter(&[&server], PATIENCE).claim(&claim("a", 1)), Ok(Ruling::Won));
        assert_eq!(arbiter(&[&server], PATIENCE).claim(&claim("b", 1)), Ok(lost("a")));
        assert_eq!(arbiter(&[&server], PATIENCE).claim(&claim("b", 2)), Ok(Ruling::Won));
    }
    assert!(server.requests().iter().all(|request| request.path == "/v3/kv/txn" && request.token.is_none()));
}

#[test]
fn answer_lost_after_its_effect_is_won_when_asked_again() {
    let store = Store::default();
    let (kept, calls) = (store.clone(), AtomicUsize::new(0));
    let server = Server::start(move |request| {
        let answer = kept.txn(&request.body);
        if calls.fetch_add(1, Ordering::Relaxed) == 0 { Reply::Close } else { Reply::Http(200, answer) }
    });
    let arbiter = arbiter(&[&server], PATIENCE);

    let error = arbiter.claim(&claim("a", 1)).expect_err("the answer is lost");
    assert!(
        !error.is_contradictory() && error.to_string().contains("unknown whether the claim was won"),
        "{error}"
    );

    assert_eq!(arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
    assert_eq!(arbiter.claim(&claim("b", 1)), Ok(lost("a")));
}

#[test]
fn endpoint_that_is_silent_does_not_hold_up_the_claim() {
    let store = Store::default();
    // The server accepts connections and sends nothing. A host that has died does not even accept them.
    let (silent, works) = (answering(Reply::Hang), etcd(&store));
    let begin = Instant::now();

    assert_eq!(arbiter(&[&silent, &works], PATIENCE).claim(&claim("a", 1)), Ok(Ruling::Won));

    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    // Both endpoints received the request, and the store has one claim.
    assert_eq!(arbiter(&[&works], PATIENCE).claim(&claim("b", 1)), Ok(lost("a")));
}

#[test]
fn next_endpoint_is_asked_if_one_fails() {
    let store = Store::default();
    let kept = store.clone();
    let loses_answers = Server::start(move |request| {
        kept.txn(&request.body);
        Reply::Close
    });
    let broken = answering(Reply::Http(503, r#"{"error":"etcdserver: no leader","code":14}"#.to_owned()));
    let (hangs, works, last) = (answering(Reply::Hang), etcd(&store), etcd(&store));
    let servers = [&broken, &loses_answers, &hangs, &works, &last];

    // The endpoint that hangs does not delay the claim.
    assert_eq!(arbiter(&servers, Duration::from_secs(10)).claim(&claim("a", 1)), Ok(Ruling::Won));

    let asked = servers.map(|server| server.requests().len());
    assert_eq!(asked[..4], [1, 1, 1, 1], "{asked:?}");
}

#[test]
fn endpoint_that_refuses_connections_is_named() {
    let address =
        TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).expect("an address");

    let error = open(&format!("etcd:http://{address}"), PATIENCE).arbiter.claim(&claim("a", 1));

    let error = error.expect_err("nobody listens");
    let text = error.to_string();
    assert!(
        !error.is_contradictory() && text.contains(&address.to_string()) && text.contains("refused"),
        "{text}"
    );
}

#[test]
fn answers_that_are_no_ruling_are_quoted() {
    let too_long = "x".repeat(100_000);
    for (reply, what) in [
        (
            Reply::Http(401, r#"{"error":"etcdserver: invalid auth token","code":16}"#.to_owned()),
            "invalid auth token",
        ),
        (
            Reply::Http(403, r#"{"error":"etcdserver: permission denied","code":7}"#.to_owned()),
            "permission denied",
        ),
        (Reply::Http(500, String::new()), "HTTP status 500"),
        (Reply::Http(503, r#"{"message":"etcdserver: no leader"}"#.to_owned()), "no leader"),
        (Reply::Http(404, "404 page not found".to_owned()), "page not found"),
        (Reply::Http(307, String::new()), "HTTP status 307"),
        (Reply::Http(200, "<html>a portal</html>".to_owned()), "a portal"),
        (Reply::Http(200, "{}".to_owned()), "not an answer of etcd 3"),
        (Reply::Http(200, String::new()), "not an answer of etcd 3"),
        (
            Reply::Http(200, r#"{"header":{"cluster_id":"7"},"succeeded":true"#.to_owned()),
            "not an answer of etcd 3",
        ),
        (Reply::Http(200, too_long), "longer than"),
        (Reply::Bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{\"header\"".to_vec()), ""),
        (Reply::Bytes(b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec()), ""),
        (Reply::Bytes(vec![0; 4096]), ""),
        (Reply::Close, ""),
    ] {
        let error = no_ruling(&answering(reply.clone()), PATIENCE);
        assert!(!error.is_contradictory() && error.to_string().contains(what), "{reply:?}: {error}");
    }
}

#[test]
fn redirects_are_not_followed() {
    let elsewhere = etcd(&Store::default());
    let to =
        format!("HTTP/1.1 307 X\r\nLocation: {}/v3/kv/txn\r\nContent-Length: 0\r\n\r\n", elsewhere.url());

    let error = no_ruling(&answering(Reply::Bytes(to.into_bytes())), PATIENCE);

    assert!(error.to_string().contains("HTTP status 307") && elsewhere.requests().is_empty(), "{error}");
}

#[test]
fn servers_that_are_slow_end_at_the_limit() {
    for reply in [Reply::Hang, Reply::Drip] {
        let began = Instant::now();

        let error = no_ruling(&answering(reply.clone()), SHORT);

        assert!(
            !error.is_contradictory() && error.to_string().contains("no answer within"),
            "{reply:?}: {error}"
        );
        assert!(began.elapsed() >= SHORT / 2, "{reply:?}");
    }
}

#[test]
fn values_that_are_no_claim_are_believed_by_nobody() {
    // "hello"; and a key without a value.
    for range in [json!({"kvs": [{"value": "aGVsbG8="}]}), json!({"kvs": [{}]}), json!({})] {
        let answer = json!({"header": {"cluster_id": "7"}, "responses": [{"response_range": range}]});

        let error = no_ruling(&answering(Reply::Http(200, answer.to_string())), PATIENCE);

        assert!(error.is_contradictory() && error.to_string().contains("sterna/claims/guest/"), "{error}");
    }
}

#[test]
fn etcd_that_forgets_a_claim_is_not_trusted() {
    let answer =
        json!({"header": {"cluster_id": "7"}, "succeeded": true, "responses": [{"response_put": {}}]});
    let server = answering(Reply::Http(200, answer.to_string()));
    let arbiter = arbiter(&[&server], PATIENCE);

    assert_eq!(arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));
    let error = arbiter.claim(&claim("b", 1)).expect_err("a contradiction");

    assert!(error.is_contradictory() && error.to_string().contains("has won"), "{error}");
}

#[test]
fn endpoints_of_two_clusters_are_not_trusted() {
    let cluster = |id: &str| {
        let answer =
            json!({"header": {"cluster_id": id}, "succeeded": true, "responses": [{"response_put": {}}]});
        Reply::Http(200, answer.to_string())
    };
    let (first, calls) = (cluster("7"), AtomicUsize::new(0));
    let one =
        Server::start(
            move |_| if calls.fetch_add(1, Ordering::Relaxed) == 0 { first.clone() } else { Reply::Close },
        );
    let other = answering(cluster("8"));
    let arbiter = arbiter(&[&one, &other], PATIENCE);
    assert_eq!(arbiter.claim(&claim("a", 1)), Ok(Ruling::Won));

    let error = arbiter.claim(&claim("a", 2)).expect_err("two arbiters");

    assert!(error.is_contradictory() && error.to_string().contains("cluster 8"), "{error}");
}

#[test]
fn user_gets_a_token_for_each_claim() {
    let store = Store::default();
    let server = Server::start(move |request| match request.path.as_str() {
        "/v3/auth/authenticate" if request.body == json!({"name": "u", "password": "p w"}) => {
            Reply::Http(200, r#"{"header":{"cluster_id":"7"},"token":"tok.1"}"#.to_owned())
        }
        "/v3/kv/txn" if request.token.as_deref() == Some("tok.1") => {
            Reply::Http(200, store.txn(&request.body))
        }
        _ => Reply::Http(401, r#"{"error":"etcdserver: invalid auth token"}"#.to_owned()),
    });
    let file = tempfile::NamedTempFile::new().expect("a file");
    let with = |password: &str| {
        std::fs::write(file.path(), password).expect("written");
        open(&format!("etcd:{},user=u,password-file={}", server.url(), file.path().display()), PATIENCE)
            .arbiter
    };

    assert_eq!(with("p w\n").claim(&claim("a", 1)), Ok(Ruling::Won));
    let error = with("wrong").claim(&claim("a", 1)).expect_err("refused");

    let text = format!("{error} {:?}", with("wrong"));
    assert!(text.contains("no token for user \"u\"") && text.contains("invalid auth token"), "{text}");
    assert!(!text.contains("wrong"), "{text}");
}

#[test]
fn identity_is_a_token_that_the_other_side_finds_in_the_same_etcd_alone() {
    // Both servers have the same cluster id, like clusters with the same configuration.
    let (server, copy) = (keeping(), keeping());
    let identity = |url: &str, more: &str| {
        let arbiter = open(&format!("etcd:{url}{more}"), PATIENCE).arbiter;
        arbiter.identity(&claim("a", 1).guest, claim("a", 1).generation)
    };

    let first = identity(&server.url(), "").expect("a token");

    assert_eq!(identity(&server.url(), ""), Ok(first.clone()));
    assert_ne!(identity(&copy.url(), ""), Ok(first.clone()), "another etcd");
    assert_ne!(identity(&server.url(), ",prefix=other/"), Ok(first.clone()), "another prefix");

    // An endpoint that does not answer does not fail the call; an endpoint of another cluster does.
    let other = answering(Reply::Http(200, r#"{"header":{"cluster_id":"8"}}"#.to_owned()));
    let broken = answering(Reply::Close);
    assert_eq!(identity(&server.url(), &format!(",{}", broken.url())), Ok(first.clone()));
    let error = identity(&server.url(), &format!(",{}", other.url())).expect_err("two arbiters");
    assert!(error.is_contradictory() && error.to_string().contains("cluster 8"), "{error}");

    // The token is removed after both sides have read it.
    let arbiter = open(&format!("etcd:{}", server.url()), PATIENCE).arbiter;
    arbiter.forget_identity(&claim("a", 1).guest, claim("a", 1).generation);
    assert_ne!(identity(&server.url(), ""), Ok(first));
}

#[test]
fn what_is_no_token_is_named() {
    let server = Server::start(|request| {
        let body = match request.path.as_str() {
            "/v3/kv/range" => r#"{"header":{"cluster_id":"7"}}"#.to_owned(),
            _ => r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":[{"value":"aGVsbG8="}]}}]}"#.to_owned(),
        };
        Reply::Http(200, body)
    });
    let arbiter = open(&format!("etcd:{}", server.url()), PATIENCE).arbiter;

    let error = arbiter.identity(&claim("a", 1).guest, claim("a", 1).generation).expect_err("foreign");

    assert!(
        error.is_contradictory() && error.to_string().contains("not contain a token of an arbiter"),
        "{error}"
    );
}

/// Starts a server that behaves as an etcd of cluster 7.
fn keeping() -> Server {
    let store = Store::default();
    Server::start(move |request| {
        let body = match request.path.as_str() {
            "/v3/kv/range" => r#"{"header":{"cluster_id":"7"}}"#.to_owned(),
            "/v3/kv/deleterange" => store.delete(&request.body),
            _ => store.txn(&request.body),
        };
        Reply::Http(200, body)
    })
}
