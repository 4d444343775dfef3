//! Requests to etcd's JSON gateway, and the decoding of its answers.
//!
//! Decoding is strict: an answer that is not understood is no ruling.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use crate::names::quoted;

/// The content of a claim's key after the transaction.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stored {
    /// The transaction created the key with the sent value.
    Created,
    /// The key already existed, with this value.
    Before(Vec<u8>),
    /// The key exists and has no value.
    Nothing,
}

/// Builds the transaction that creates the key with the value, or reads the existing key.
pub(super) fn claim(key: &str, value: &str) -> String {
    let key = STANDARD.encode(key);
    json!({
        "compare": [{"target": "CREATE", "result": "EQUAL", "key": key, "createRevision": "0"}],
        "success": [{"requestPut": {"key": key, "value": STANDARD.encode(value)}}],
        "failure": [{"requestRange": {"key": key}}],
    })
    .to_string()
}

/// Builds the request that counts the entries of a key: 0 or 1.
pub(super) fn count(key: &str) -> String {
    json!({"key": STANDARD.encode(key), "countOnly": true}).to_string()
}

/// Builds the request that deletes a key.
pub(super) fn delete(key: &str) -> String {
    json!({"key": STANDARD.encode(key)}).to_string()
}

/// Builds the request for an authentication token.
pub(super) fn login(user: &str, password: &str) -> Zeroizing<String> {
    // `json!` makes a copy of the password that is not overwritten.
    Zeroizing::new(json!({"name": user, "password": password}).to_string())
}

/// Decodes the answer to [`claim`], with the id of the cluster that sent it.
pub(super) fn read_claim(bytes: &[u8]) -> Result<(String, Stored), String> {
    let answer = parse(bytes)?;
    let cluster = cluster(&answer, bytes)?;
    let response = match field(&answer, "responses", "responses").and_then(Value::as_array).map(Vec::as_slice)
    {
        Some([response]) => response,
        _ => return Err(not_understood(bytes)),
    };
    // etcd's JSON omits fields that are false.
    let stored = match answer.get("succeeded").unwrap_or(&Value::Bool(false)) {
        Value::Bool(true) => field(response, "response_put", "responsePut")
            .filter(|put| put.is_object())
            .map(|_| Stored::Created),
        Value::Bool(false) => {
            let range = field(response, "response_range", "responseRange").filter(|range| range.is_object());
            range.and_then(|range| before(range.get("kvs")))
        }
        _ => None,
    };
    stored.map(|stored| (cluster, stored)).ok_or_else(|| not_understood(bytes))
}

/// Decodes the id of the cluster that sent an answer.
pub(super) fn read_cluster(bytes: &[u8]) -> Result<String, String> {
    cluster(&parse(bytes)?, bytes)
}

/// Decodes the answer to [`login`].
pub(super) fn read_token(bytes: &[u8]) -> Result<Zeroizing<String>, String> {
    // The answer may contain a token, which is a secret, so no error quotes it.
    let wrong = || "the answer to the login has no token, so this is not an etcd 3".to_owned();
    let answer = parse(bytes).map_err(|_| wrong())?;
    let token = answer["token"].as_str().filter(|token| !token.is_empty());
    let token = token.filter(|token| token.bytes().all(|byte| byte.is_ascii_graphic())).ok_or_else(wrong)?;
    Ok(Zeroizing::new(token.to_owned()))
}

/// Describes an answer whose HTTP status is not 200.
pub(super) fn refusal(status: u16, bytes: &[u8]) -> String {
    let answer = parse(bytes).unwrap_or_default();
    let said = ["message", "error", "Error"].iter().find_map(|name| answer[*name].as_str());
    let said = match said {
        Some(said) => quoted(said.as_bytes()),
        None if bytes.is_empty() => "nothing more".to_owned(),
        None => quoted(bytes),
    };
    format!("it answers with HTTP status {status}: {said}")
}

/// Returns the value of the only key.
fn before(pairs: Option<&Value>) -> Option<Stored> {
    match pairs.map(|pairs| pairs.as_array().map(Vec::as_slice)) {
        None | Some(Some([])) => Some(Stored::Nothing),
        Some(Some([pair])) => match pair.get("value") {
            // etcd's JSON omits an empty value.
            None => Some(Stored::Before(Vec::new())),
            Some(value) => STANDARD.decode(value.as_str()?).ok().map(Stored::Before),
        },
        _ => None,
    }
}

fn cluster(answer: &Value, bytes: &[u8]) -> Result<String, String> {
    let header = answer.get("header").unwrap_or(&Value::Null);
    match field(header, "cluster_id", "clusterId") {
        Some(Value::String(id)) if !id.is_empty() => Ok(id.clone()),
        Some(Value::Number(id)) => Ok(id.to_string()),
        _ => Err(not_understood(bytes)),
    }
}

/// Returns a field by either of the gateway's spellings: snake case or camel case.
fn field<'a>(value: &'a Value, name: &str, other: &str) -> Option<&'a Value> {
    value.get(name).or_else(|| value.get(other))
}

fn parse(bytes: &[u8]) -> Result<Value, String> {
    serde_json::from_slice(bytes).map_err(|_| not_understood(bytes))
}

fn not_understood(bytes: &[u8]) -> String {
    format!("its answer is not an answer of etcd 3: {}", quoted(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_those_of_the_documentation() {
        let request: Value = serde_json::from_str(&claim("foo", "bar")).expect("JSON");

        assert_eq!(
            request,
            json!({
                "compare": [{"target": "CREATE", "result": "EQUAL", "key": "Zm9v", "createRevision": "0"}],
                "success": [{"requestPut": {"key": "Zm9v", "value": "YmFy"}}],
                "failure": [{"requestRange": {"key": "Zm9v"}}],
            })
        );
    }

    #[test]
    fn answers_are_read_in_both_spellings() {
        for (text, stored) in [
            (
                r#"{"header":{"cluster_id":"7"},"succeeded":true,"responses":[{"response_put":{}}]}"#,
                Stored::Created,
            ),
            (
                r#"{"header":{"clusterId":"7"},"succeeded":true,"responses":[{"responsePut":{}}]}"#,
                Stored::Created,
            ),
            (
                r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":[{"value":"YmFy"}]}}]}"#,
                Stored::Before(b"bar".to_vec()),
            ),
            (
                r#"{"header":{"clusterId":7},"succeeded":false,"responses":[{"responseRange":{"kvs":[{}]}}]}"#,
                Stored::Before(Vec::new()),
            ),
            (r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{}}]}"#, Stored::Nothing),
        ] {
            assert_eq!(read_claim(text.as_bytes()), Ok(("7".to_owned(), stored)), "{text}");
        }
    }

    #[test]
    fn anything_else_is_no_ruling() {
        for text in [
            "",
            "{}",
            "null",
            "[]",
            "<html>",
            r#"{"succeeded":true}"#,
            r#"{"header":{},"succeeded":true,"responses":[{"response_put":{}}]}"#,
            r#"{"succeeded":true,"responses":[{"response_put":{}}]}"#,
            r#"{"header":{"cluster_id":"7"},"succeeded":true}"#,
            r#"{"header":{"cluster_id":"7"},"succeeded":true,"responses":[]}"#,
            r#"{"header":{"cluster_id":"7"},"succeeded":true,"responses":[{"response_range":{}}]}"#,
            r#"{"header":{"cluster_id":"7"},"succeeded":"true","responses":[{"response_put":{}}]}"#,
            r#"{"header":{"cluster_id":"7"},"responses":[{"response_put":{}}]}"#,
            r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":[{"value":"*"}]}}]}"#,
            r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":[{"value":1}]}}]}"#,
            r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":[{},{}]}}]}"#,
            r#"{"header":{"cluster_id":"7"},"responses":[{"response_range":{"kvs":7}}]}"#,
        ] {
            let error = read_claim(text.as_bytes()).expect_err(text);
            assert!(error.contains("not an answer of etcd 3"), "{error}");
        }
    }

    #[test]
    fn tokens_that_could_change_the_request_are_refused() {
        assert_eq!(read_token(br#"{"token":"a.b"}"#).as_deref().map(String::as_str), Ok("a.b"));
        for text in [r#"{"token":""}"#, r#"{"token":"a\r\nb: c"}"#, "{}", r#"{"token":"secret""#] {
            let error = read_token(text.as_bytes()).expect_err(text);
            assert!(!error.contains("secret"), "{error}");
        }
    }

    #[test]
    fn refusals_say_what_etcd_says() {
        let text = br#"{"error":"etcdserver: permission denied","code":7}"#;

        assert!(refusal(403, text).contains("403") && refusal(403, text).contains("permission denied"));
        assert!(refusal(502, b"<html>").contains("<html>"));
        assert!(refusal(500, b"").contains("nothing more"));
    }
}
