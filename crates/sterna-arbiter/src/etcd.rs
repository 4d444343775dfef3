//! The arbiter `etcd:URL,...`: a transaction creates one key per generation.
//!
//! The transaction compares the key's create revision with 0, which means that the key does not exist. If so,
//! it stores the claim; otherwise it reads the stored one. etcd does both atomically, so the answer is final. A
//! claimant that asks again reads its own claim.
//!
//! The endpoints are asked in order until one answers. After a short delay, the next endpoint is asked while a
//! silent one is still pending. It does no harm if an endpoint stored the claim but its answer was lost: all
//! endpoints share one store.
//!
//! The protocol is etcd's JSON gateway (`POST /v3/kv/txn`, keys and values in Base64), as etcd's documentation
//! describes it.

mod http;
mod messages;
mod options;
mod tls;

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use zeroize::Zeroizing;

pub(crate) use options::EtcdOptions;

use crate::arbiter::{Arbiter, Identity, Ruling};
use crate::claim::{Claim, Generation, GuestName};
use crate::error::ClaimError;
use crate::names::{encoded, is_token, quoted, token};
use crate::record;
use http::Http;
use messages::Stored;

const REMEDY: &str = "check that etcd runs with a majority of its members, that this host can reach it, and that it \
                      accepts this side's certificate, user and password; then ask again";

/// Time without an answer after which the next endpoint is asked in addition.
const STAGGER: Duration = Duration::from_millis(200);
/// Time for the remaining endpoints after the first answer, where all are asked.
const GRACE: Duration = Duration::from_secs(1);
/// Time by which a request may exceed its limit to return its own error.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// An arbiter that stores each claim as a key in etcd.
#[derive(Debug)]
pub(crate) struct Etcd {
    name: String,
    endpoints: Vec<String>,
    prefix: String,
    client: Arc<Client>,
    limit: Duration,
    /// The id of the cluster that answered first.
    cluster: Mutex<Option<String>>,
}

/// How many endpoints must answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whom {
    FirstThatAnswers,
    All,
}

/// The credentials and the HTTP client for requests to an endpoint.
#[derive(Debug)]
struct Client {
    user: Option<User>,
    http: Http,
}

/// An endpoint and its answer.
type Asked = (String, Result<Vec<u8>, String>);

struct User {
    name: String,
    password: Zeroizing<String>,
}

impl Client {
    fn ask(&self, endpoint: &str, path: &str, body: &str, limit: Duration) -> Result<Vec<u8>, String> {
        let deadline = Instant::now() + limit;
        let token = match &self.user {
            Some(user) => {
                let login = messages::login(&user.name, &user.password);
                let url = format!("{endpoint}/v3/auth/authenticate");
                let answer = self.http.post(&url, None, &login, limit);
                let answer =
                    answer.map_err(|problem| format!("no token for user {:?}: {problem}", user.name))?;
                Some(messages::read_token(&answer)?)
            }
            None => None,
        };
        let left = deadline.saturating_duration_since(Instant::now());
        self.http.post(&format!("{endpoint}{path}"), token.as_ref().map(|token| token.as_str()), body, left)
    }
}

impl Etcd {
    /// Reads the certificates and the password. The error names the file that cannot be used.
    pub(crate) fn open(options: &EtcdOptions, name: String, limit: Duration) -> Result<Self, String> {
        let user = match &options.user {
            Some((name, file)) => Some(User { name: name.clone(), password: options::password(file)? }),
            None => None,
        };
        Ok(Self {
            name,
            endpoints: options.endpoints.clone(),
            prefix: options.prefix.clone(),
            client: Arc::new(Client { user, http: Http::new(options.tls.as_ref())? }),
            limit,
            cluster: Mutex::new(None),
        })
    }

    fn key(&self, guest: &GuestName, generation: Generation) -> String {
        format!("{}{}/{generation}", self.prefix, encoded(guest.as_str()))
    }

    fn token_key(&self, guest: &GuestName, generation: Generation) -> String {
        format!("{}/token", self.key(guest, generation))
    }

    /// Posts to the endpoints until one answers, or to all.
    ///
    /// A silent endpoint does not delay the next one, which is asked after [`STAGGER`]. All endpoints use one
    /// store, so several endpoints that store the same claim store it once.
    fn ask<T>(
        &self,
        whom: Whom,
        path: &'static str,
        body: &str,
        read: impl Fn(&[u8]) -> Result<(String, T), String>,
    ) -> Result<T, ClaimError> {
        // The last tenth of the limit lets a request return its own error message.
        let mut deadline = Instant::now() + self.limit * 9 / 10;
        let (sender, answers) = channel();
        let (mut next, mut next_at, mut running) = (self.endpoints.iter(), Instant::now(), 0);
        let (mut problems, mut answered) = (Vec::new(), None);
        loop {
            let now = Instant::now();
            let is_due = running == 0 || whom == Whom::All || now >= next_at;
            if is_due
                && now < deadline
                && let Some(endpoint) = next.next()
            {
                match self.ask_beside(endpoint, path, body, deadline - now, &sender) {
                    Ok(()) => running += 1,
                    Err(error) => problems.push(format!("{endpoint}: cannot start a thread: {error}")),
                }
                next_at = now + STAGGER;
                continue;
            }
            let until = if next.len() > 0 { next_at.min(deadline) } else { deadline + LAST_WORDS };
            if running == 0 || now >= deadline + LAST_WORDS {
                break;
            }
            let Ok((endpoint, answer)) = answers.recv_timeout(until.saturating_duration_since(now)) else {
                continue;
            };
            running -= 1;
            match answer.and_then(|bytes| read(&bytes)) {
                Ok((cluster, answer)) => {
                    self.of_one_cluster(&endpoint, cluster)?;
                    answered = Some(answer);
                    if whom == Whom::FirstThatAnswers {
                        break;
                    }
                    // A dead endpoint must not delay the result by the full limit.
                    deadline = deadline.min(now + GRACE);
                }
                Err(problem) => {
                    problems.push(format!("{endpoint}: {problem}"));
                    next_at = now;
                }
            }
        }
        answered.ok_or_else(|| ClaimError::unreachable(&self.name, problems.join("; "), REMEDY))
    }

    /// Asks one endpoint in a new thread, which ends within `limit`.
    fn ask_beside(
        &self,
        endpoint: &str,
        path: &'static str,
        body: &str,
        limit: Duration,
        sender: &Sender<Asked>,
    ) -> std::io::Result<()> {
        let (client, endpoint, body) = (Arc::clone(&self.client), endpoint.to_owned(), body.to_owned());
        let sender = sender.clone();
        let ask = move || {
            let answer = client.ask(&endpoint, path, &body, limit);
            // A send error means that another endpoint was faster and the receiver is dropped.
            let _ = sender.send((endpoint, answer));
        };
        std::thread::Builder::new().name("etcd".to_owned()).spawn(ask).map(drop)
    }

    /// Fails if an endpoint belongs to another cluster, which would be a second arbiter.
    fn of_one_cluster(&self, endpoint: &str, cluster: String) -> Result<(), ClaimError> {
        let mut known = self.cluster.lock();
        let known = known.get_or_insert_with(|| cluster.clone());
        if *known == cluster {
            return Ok(());
        }
        Err(ClaimError::contradictory(
            &self.name,
            format!("{endpoint} belongs to the cluster {cluster}, but the cluster {known} answered before"),
            "give only endpoints of one cluster, on both sides, and find out yourself which side runs the guest",
        ))
    }

    fn ruling(&self, claim: &Claim, key: &str, stored: Stored) -> Result<Ruling, ClaimError> {
        let problem = match stored {
            Stored::Created => return Ok(Ruling::Won),
            Stored::Before(bytes) => match record::decode(&bytes, &claim.guest, claim.generation) {
                Ok(winner) if winner == claim.claimant => return Ok(Ruling::Won),
                Ok(winner) => return Ok(Ruling::Lost { winner: Some(winner) }),
                Err(problem) => problem,
            },
            Stored::Nothing => "it answers that the key exists, but sends no value".to_owned(),
        };
        Err(ClaimError::contradictory(
            &self.name,
            format!("key {key:?}: {problem}"),
            "find out yourself which side runs the guest, and which program wrote that key. Do not delete it until it \
             is clear which side has the guest",
        ))
    }
}

impl Arbiter for Etcd {
    fn claim(&self, claim: &Claim) -> Result<Ruling, ClaimError> {
        let key = self.key(&claim.guest, claim.generation);
        let body = messages::claim(&key, &record::encode(claim));
        let stored = self.ask(Whom::FirstThatAnswers, "/v3/kv/txn", &body, messages::read_claim)?;
        self.ruling(claim, &key, stored)
    }

    /// Returns a random token of the guest's generation. Also compares the clusters of all endpoints that
    /// answer.
    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError> {
        let key = self.key(guest, generation);
        let body = messages::count(&key);
        self.ask(Whom::All, "/v3/kv/range", &body, |bytes| Ok((messages::read_cluster(bytes)?, ())))?;
        // Clusters with the same configuration have the same cluster id, so the id alone proves nothing.
        let (key, wanted) = (self.token_key(guest, generation), token());
        let body = messages::claim(&key, &wanted);
        let found = match self.ask(Whom::FirstThatAnswers, "/v3/kv/txn", &body, messages::read_claim)? {
            Stored::Created => wanted,
            Stored::Before(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
            Stored::Nothing => String::new(),
        };
        if !is_token(&found) {
            return Err(ClaimError::contradictory(
                &self.name,
                format!("key {key:?} does not contain a token of an arbiter: {}", quoted(found.as_bytes())),
                "find out which program wrote that key",
            ));
        }
        Ok(Identity::Is(found))
    }

    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        let body = messages::delete(&self.token_key(guest, generation));
        // A token that remains has no effect on claims.
        let _ = self.ask(Whom::FirstThatAnswers, "/v3/kv/deleterange", &body, |bytes| {
            Ok((messages::read_cluster(bytes)?, ()))
        });
    }
}

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The password is left out, so that it never reaches a log.
        f.debug_struct("User").field("name", &self.name).finish()
    }
}
