//! Answers in the shape of `vllm serve` 0.32.0.

use lastgasp_tests::model::{Endpoint, Finish, Piece, decode};
use serde_json::{Value, json};

use super::{Answer, Choice, CompletionLogprobs, Logprob, Usage, chat_logprobs};

const FINGERPRINT: &str = "vllm-0.32.0-5bfb717b";

pub(super) fn chunks(answer: &Answer, choice: &Choice, opens: bool, piece: &Piece, logprobs: &[Logprob]) -> Vec<Value> {
    match answer.request.endpoint {
        Endpoint::Completions => vec![completion_chunk(answer, choice, opens, piece, logprobs)],
        Endpoint::Chat => {
            let role = opens.then(|| chat_role_chunk(answer, choice));
            role.into_iter().chain([chat_chunk(answer, choice, piece, logprobs)]).collect()
        }
    }
}

fn completion_chunk(answer: &Answer, choice: &Choice, opens: bool, piece: &Piece, logprobs: &[Logprob]) -> Value {
    let ids = answer.request.return_token_ids;
    // With `return_token_ids` the echo of the prompt is lost (measured).
    let echo = if opens && answer.request.echo && !ids { decode(&choice.prompt) } else { String::new() };
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([{
        "index": choice.index,
        "text": format!("{echo}{}", piece.text),
        "logprobs": completion_logprobs(logprobs),
        "finish_reason": piece.finish.as_ref().map(Finish::reason),
        "stop_reason": stop_reason(piece),
        "prompt_token_ids": (ids && opens).then_some(&choice.prompt),
        "token_ids": ids.then_some(&piece.ids),
    }]);
    if answer.request.continuous_usage_stats {
        chunk["usage"] = usage(answer.usage_of(choice));
    }
    with_fingerprint(answer, piece, chunk)
}

fn chat_role_chunk(answer: &Answer, choice: &Choice) -> Value {
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([{
        "index": choice.index, "delta": {"role": "assistant", "content": ""},
        "logprobs": null, "finish_reason": null
    }]);
    if answer.request.continuous_usage_stats {
        chunk["usage"] = chat_usage(Usage { completion: 0, ..answer.usage_of(choice) });
    }
    chunk["prompt_token_ids"] = json!(answer.request.return_token_ids.then_some(&choice.prompt));
    chunk["prompt_text"] = Value::Null;
    chunk
}

fn chat_chunk(answer: &Answer, choice: &Choice, piece: &Piece, logprobs: &[Logprob]) -> Value {
    let mut entry = json!({
        "index": choice.index, "delta": {"content": piece.text},
        "logprobs": (!logprobs.is_empty()).then(|| chat_logprobs(logprobs)),
        "finish_reason": piece.finish.as_ref().map(Finish::reason),
    });
    if piece.finish.is_some() {
        entry["stop_reason"] = stop_reason(piece);
    }
    entry["token_ids"] = json!(answer.request.return_token_ids.then_some(&piece.ids));
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([entry]);
    if answer.request.continuous_usage_stats {
        chunk["usage"] = chat_usage(answer.usage_of(choice));
    }
    with_fingerprint(answer, piece, chunk)
}

pub(super) fn usage_chunk(answer: &Answer) -> Value {
    let mut chunk = answer.begin(true);
    chunk["choices"] = json!([]);
    chunk["usage"] = usage(answer.usage());
    chunk["system_fingerprint"] = json!(FINGERPRINT);
    chunk
}

pub(super) fn unary(answer: &Answer) -> Value {
    let ids = answer.request.return_token_ids;
    let choices: Vec<Value> = answer
        .choices
        .iter()
        .map(|choice| match answer.request.endpoint {
            Endpoint::Completions => unary_completion_choice(answer, choice),
            Endpoint::Chat => json!({
                "index": choice.index,
                "message": {
                    "role": "assistant", "content": choice.whole.text, "refusal": null,
                    "annotations": null, "audio": null, "function_call": null, "reasoning": null
                },
                "logprobs": (!choice.logprobs.is_empty())
                    .then(|| chat_logprobs(&choice.logprobs)),
                "finish_reason": choice.whole.finish.as_ref().map(Finish::reason),
                "stop_reason": stop_reason(&choice.whole),
                "token_ids": ids.then_some(&choice.whole.ids),
                "routed_experts": null,
            }),
        })
        .collect();
    let mut whole = answer.begin(false);
    whole["choices"] = json!(choices);
    whole["service_tier"] = Value::Null;
    whole["system_fingerprint"] = json!(FINGERPRINT);
    whole["usage"] = usage(answer.usage());
    whole["usage"]["prompt_tokens_details"] = Value::Null;
    whole["usage"]["completion_tokens_details"] = Value::Null;
    if answer.request.endpoint == Endpoint::Chat {
        whole["prompt_logprobs"] = Value::Null;
        whole["prompt_token_ids"] = json!(ids.then_some(&answer.choices[0].prompt));
        whole["prompt_text"] = Value::Null;
    }
    whole["kv_transfer_params"] = Value::Null;
    whole["ec_transfer_params"] = Value::Null;
    whole["metrics"] = Value::Null;
    whole
}

fn unary_completion_choice(answer: &Answer, choice: &Choice) -> Value {
    let ids = answer.request.return_token_ids;
    let echo = if answer.request.echo { decode(&choice.prompt) } else { String::new() };
    json!({
        "index": choice.index,
        "text": format!("{echo}{}", choice.whole.text),
        "logprobs": completion_logprobs(&choice.logprobs),
        "finish_reason": choice.whole.finish.as_ref().map(Finish::reason),
        "stop_reason": stop_reason(&choice.whole),
        "token_ids": ids.then_some(&choice.whole.ids),
        "prompt_logprobs": null,
        "prompt_token_ids": ids.then_some(&choice.prompt),
        "routed_experts": null,
    })
}

fn completion_logprobs(logprobs: &[Logprob]) -> Value {
    if logprobs.is_empty() {
        return Value::Null;
    }
    let lists = CompletionLogprobs::new(logprobs);
    json!({
        "text_offset": lists.offsets, "token_logprobs": lists.values,
        "tokens": lists.tokens, "top_logprobs": lists.top
    })
}

fn stop_reason(piece: &Piece) -> Value {
    match &piece.finish {
        Some(Finish::StopString(stop)) => json!(stop),
        Some(Finish::StopToken(id)) => json!(id),
        _ => Value::Null,
    }
}

fn usage(usage: Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "total_tokens": usage.prompt + usage.completion,
        "completion_tokens": usage.completion
    })
}

/// Only the running usage of a chat has the details.
fn chat_usage(counts: Usage) -> Value {
    let mut value = usage(counts);
    value["completion_tokens_details"] = Value::Null;
    value
}

/// On the last chunk of a choice, or on the usage chunk if there will be one.
fn with_fingerprint(answer: &Answer, piece: &Piece, mut chunk: Value) -> Value {
    if piece.finish.is_some() && !answer.request.include_usage {
        chunk["system_fingerprint"] = json!(FINGERPRINT);
    }
    chunk
}
