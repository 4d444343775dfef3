//! `etcd:URL,...`: a key of the generation, which a transaction creates if it is not there.
//!
//! Compare: the key's create revision is 0, so there is none. Then: put. Else: read. etcd does all of it at one moment, so the
//! answer is final, and a claimant that asks again reads itself. The endpoints are asked in their order until one answers: an
//! endpoint that took the claim and whose answer was lost does no harm.
//!
//! etcd's JSON gateway is spoken (`POST /v3/kv/txn`, keys and values in Base64), as etcd's documentation describes it.

mod http;
mod messages;
mod options;
mod tls;

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

const REMEDY: &str = "see that etcd runs with a majority of its members, that this host reaches it, and that it accepts this side's \
     certificate, user and password; then ask again";

/// Claims are keys of an etcd.
#[derive(Debug)]
pub(crate) struct Etcd {
    name: String,
    endpoints: Vec<String>,
    prefix: String,
    user: Option<User>,
    http: Http,
    limit: Duration,
    /// The cluster that answered first.
    cluster: Mutex<Option<String>>,
}

/// Which endpoints are asked.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Whom {
    FirstThatAnswers,
    All,
}

struct User {
    name: String,
    password: Zeroizing<String>,
}

impl Etcd {
    /// Reads the files; the text says which one cannot be used.
    pub(crate) fn open(options: &EtcdOptions, name: String, limit: Duration) -> Result<Self, String> {
        let user = match &options.user {
            Some((name, file)) => Some(User { name: name.clone(), password: options::password(file)? }),
            None => None,
        };
        Ok(Self {
            name,
            endpoints: options.endpoints.clone(),
            prefix: options.prefix.clone(),
            user,
            http: Http::new(options.tls.as_ref())?,
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

    /// Posts to the endpoints in their order until one answers, or to all; each gets its part of the time that is left.
    fn ask<T>(
        &self,
        whom: Whom,
        path: &str,
        body: &str,
        read: impl Fn(&[u8]) -> Result<(String, T), String>,
    ) -> Result<T, ClaimError> {
        let deadline = Instant::now() + self.limit;
        let (mut problems, mut answered) = (Vec::new(), None);
        for (at, endpoint) in self.endpoints.iter().enumerate() {
            let left = u32::try_from(self.endpoints.len() - at).unwrap_or(u32::MAX);
            let part = deadline.saturating_duration_since(Instant::now()) / left;
            match self.ask_one(endpoint, path, body, part).and_then(|bytes| read(&bytes)) {
                Ok((cluster, answer)) => {
                    self.of_one_cluster(endpoint, cluster)?;
                    answered = Some(answer);
                    if whom == Whom::FirstThatAnswers {
                        break;
                    }
                }
                Err(problem) => problems.push(format!("{endpoint}: {problem}")),
            }
        }
        answered.ok_or_else(|| ClaimError::unreachable(&self.name, problems.join("; "), REMEDY))
    }

    fn ask_one(&self, endpoint: &str, path: &str, body: &str, limit: Duration) -> Result<Vec<u8>, String> {
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

    /// Endpoints of two clusters would be two arbiters.
    fn of_one_cluster(&self, endpoint: &str, cluster: String) -> Result<(), ClaimError> {
        let mut known = self.cluster.lock();
        let known = known.get_or_insert_with(|| cluster.clone());
        if *known == cluster {
            return Ok(());
        }
        Err(ClaimError::contradictory(
            &self.name,
            format!("{endpoint} answers for the cluster {cluster}, and the cluster {known} answered before"),
            "name endpoints of one cluster only, on both sides, and find out by hand which side runs the guest",
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
            Stored::Nothing => "it says that the key is there, and gives no value".to_owned(),
        };
        Err(ClaimError::contradictory(
            &self.name,
            format!("key {key:?}: {problem}"),
            "find out by hand which side runs the guest and what wrote that key; do not delete it while a side is in doubt",
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

    /// A random token of the guest's generation. Also compares the clusters of all endpoints that answer.
    fn identity(&self, guest: &GuestName, generation: Generation) -> Result<Identity, ClaimError> {
        let key = self.key(guest, generation);
        let body = messages::count(&key);
        self.ask(Whom::All, "/v3/kv/range", &body, |bytes| Ok((messages::read_cluster(bytes)?, ())))?;
        // Clusters that were set up alike have one number, so that says little.
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
                format!("key {key:?} holds no token of an arbiter: {}", quoted(found.as_bytes())),
                "find out by hand what wrote that key",
            ));
        }
        Ok(Identity::Is(found))
    }

    fn forget_identity(&self, guest: &GuestName, generation: Generation) {
        let body = messages::delete(&self.token_key(guest, generation));
        // What stays decides nothing.
        let _ = self.ask(Whom::FirstThatAnswers, "/v3/kv/deleterange", &body, |bytes| {
            Ok((messages::read_cluster(bytes)?, ()))
        });
    }
}

impl std::fmt::Debug for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Never the password.
        f.debug_struct("User").field("name", &self.name).finish()
    }
}
